#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings/bindings.hpp"
#include "bindings/cache_handle.hpp"
#include "service/express_end.hpp"
#include "service/express_server.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

nb::tuple receive_frames(ExpressEnd& end) {
    nb::list frames;
    const bool goes_on = end.receive([&](std::span<const std::uint8_t> frame) {
        frames.append(nb::bytes(frame.data(), frame.size()));
        return true;
    });
    return nb::make_tuple(frames, goes_on);
}

nb::tuple take_stored(ExpressServer& server) {
    const StoredLog::Taken taken = server.log().take();
    nb::list stored;
    for (const StoredBlocks& blocks : taken.stored) {
        stored.append(nb::make_tuple(blocks.owner, blocks.group, to_bytes(blocks.hashes), to_bytes(blocks.parents),
                                     blocks.is_forgotten));
    }
    return nb::make_tuple(stored, taken.lost);
}

nb::dict call_times(const ExpressServer& server) {
    nb::dict told;
    for (const CallTimes::Row& row : server.times().rows()) {
        nb::list counts;
        for (const auto& count : row.counts) {
            counts.append(count.load());
        }
        told[nb::str(row.name.data(), row.name.size())] = nb::make_tuple(nb::tuple(counts), row.sum_ns.load());
    }
    return told;
}

nb::dict refusals(const ExpressServer& server, std::uint64_t domain) {
    nb::dict told;
    for (std::uint64_t code = 0; code < RefusalCounts::kCodes; ++code) {
        if (const std::uint64_t count = server.count_refusals(domain, code); count != 0) {
            told[nb::int_(code)] = count;
        }
    }
    return told;
}

}  // namespace

void bind_express(nb::module_& module) {
    nb::class_<ExpressServer>(module, "ExpressServer", "Express channels, a thread for each.")
        .def(
            "__init__",
            [](ExpressServer* self, std::uint64_t boot_id, std::size_t frame_bytes, std::size_t blocks,
               std::size_t batch, std::size_t leases, std::size_t shards, std::size_t channels, std::size_t logged,
               std::uint64_t message_bytes) {
                const ExpressTerms terms{.boot_id = boot_id,
                                         .frame_bytes = frame_bytes,
                                         .blocks = blocks,
                                         .batch = batch,
                                         .leases = leases,
                                         .shards = shards};
                new (self) ExpressServer(terms, channels, logged, message_bytes);
            },
            nb::kw_only(), nb::arg("boot_id"), nb::arg("frame_bytes"), nb::arg("blocks"), nb::arg("batch"),
            nb::arg("leases"), nb::arg("shards"), nb::arg("channels"), nb::arg("logged"), nb::arg("message_bytes"))
        .def(
            "open",
            [](ExpressServer& self, int end, const Cache& cache, std::uint64_t session, SessionId cache_session,
               std::uint32_t name_space, std::uint32_t tenant, std::vector<TenantNumber> tenants, std::uint64_t owner,
               std::string user, std::uint64_t domain) {
                return self.open(FileDescriptor(end), cache.core(),
                                 {.session = session,
                                  .cache_session = cache_session,
                                  .name_space = name_space,
                                  .tenant = static_cast<TenantNumber>(tenant),
                                  .tenants = std::move(tenants),
                                  .owner = owner,
                                  .user = std::move(user)},
                                 domain);
            },
            nb::kw_only(), nb::arg("end"), nb::arg("cache"), nb::arg("session"), nb::arg("cache_session"),
            nb::arg("name_space"), nb::arg("tenant"), nb::arg("tenants"), nb::arg("owner"), nb::arg("user"),
            nb::arg("domain"), "Takes the descriptor.")
        .def("log_file", [](ExpressServer& self) { return self.log().file(); })
        .def("watch_stored", [](ExpressServer& self, bool is_wanted) { self.log().watch(is_wanted); })
        .def(
            "take_stored", &take_stored,
            "Owner, group, hashes, parents of each batch and whether it is to be forgotten; how many blocks were lost.")
        .def("call_times", &call_times, "By call: counts by bucket, the last of longer ones, and all nanoseconds.")
        .def("refusals", &refusals, nb::arg("domain"),
             "How many calls of this domain got an error for an answer, by its code.")
        .def("end", &ExpressServer::end)
        .def("tick", &ExpressServer::tick)
        .def("start_drain", &ExpressServer::start_drain)
        .def("close", [](ExpressServer& self) {
            const WithoutGil unlocked;
            self.close();
        });
    module.attr("CALL_TIME_BOUNDS_NS") =
        nb::cast(std::vector<std::uint64_t>(CallTimes::kBoundsNs.begin(), CallTimes::kBoundsNs.end()));
    nb::class_<ExpressEnd>(module, "ExpressEnd", "A process's end of its express channel.")
        .def("file", &ExpressEnd::file)
        .def("send", [](ExpressEnd& self, nb::handle frame) { return self.send(BufferView(frame).bytes()); })
        .def("send_later",
             [](ExpressEnd& self, nb::handle frame) { return self.send_later(BufferView(frame).bytes()); })
        .def("flush", &ExpressEnd::flush)
        .def("has_unsent", &ExpressEnd::has_unsent)
        .def("receive", &receive_frames, "Frames that have come, and whether any may come still.")
        .def("wait",
             [](ExpressEnd& self, int other, std::uint64_t timeout_ns) {
                 const WithoutGil unlocked;
                 self.wait(other, timeout_ns);
             })
        .def("shut", &ExpressEnd::shut);
    module.def(
        "open_express_end",
        [](int end, std::size_t frame_bytes) { return new ExpressEnd(FileDescriptor(end), frame_bytes); },
        nb::rv_policy::take_ownership, nb::arg("end"), nb::arg("frame_bytes"), "Takes the descriptor.");
}

}  // namespace kvo

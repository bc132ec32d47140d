#include "bindings/cache_handle.hpp"

#include <nanobind/stl/vector.h>
#include <poll.h>
#include <sys/eventfd.h>

#include <cstring>
#include <memory>
#include <vector>

#include "bindings/bindings.hpp"
#include "cache/cache_core.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

// The handle by which Python holds the result of a call that was left at the writer's lock.
template <typename Left>
struct LeftHandle {
    std::shared_ptr<const Left> left;
};

template <typename Number>
std::vector<Number> copy_of(nb::handle buffer) {
    const BufferView view(buffer);
    const auto bytes = view.bytes();
    if (bytes.size() % sizeof(Number) != 0) {
        throw nb::value_error(("numbers have " + std::to_string(sizeof(Number)) + " bytes each").c_str());
    }
    std::vector<Number> numbers(bytes.size() / sizeof(Number));
    if (!bytes.empty()) {
        std::memcpy(numbers.data(), bytes.data(), bytes.size());
    }
    return numbers;
}

LeftHandle<LeftReservation> leave_reserve(const Cache& cache, SessionId session, std::uint32_t name_space,
                                          std::uint32_t group, nb::handle hashes) {
    const Space space = open_space(cache, name_space, group);
    const BufferView view(hashes);
    const auto keys = hashes_of(view);
    return {without_gil(cache, [&](CacheCore& core) {
        return core.reservations().leave_reserve(session, 0, space,
                                                 std::vector<std::uint8_t>(keys.begin(), keys.end()));
    })};
}

// Tickets and addresses, fewer than hashes where there was no room; None: it is not made yet.
nb::object take_reserved(const Cache& cache, SessionId session, const LeftHandle<LeftReservation>& handle) {
    const LeftReservation& left = *handle.left;
    if (!left.is_done.load(std::memory_order_acquire)) {
        return nb::none();
    }
    raise_if_not_ok(left.status);
    std::vector<std::uint64_t> addresses(left.tickets.size());
    raise_if_not_ok(without_gil(
        cache, [&](CacheCore& core) { return core.reservations().locate(session, left.tickets, addresses); }));
    return nb::make_tuple(to_bytes(left.tickets), to_bytes(addresses));
}

LeftHandle<LeftCommit> leave_commit(const Cache& cache, SessionId session, std::uint32_t name_space,
                                    std::uint32_t group, std::uint32_t shard, nb::handle tickets, nb::handle hashes,
                                    nb::handle parents, nb::handle digests) {
    OwnedBatch batch{.space = open_space(cache, name_space, group),
                     .shard = shard,
                     .tickets = copy_of<Ticket>(tickets),
                     .hashes = copy_of<std::uint8_t>(hashes),
                     .parents = copy_of<std::uint8_t>(parents),
                     .digests = copy_of<std::uint64_t>(digests),
                     .was_promoted = true};
    return {
        without_gil(cache, [&](CacheCore& core) { return core.commits().leave_commit(session, std::move(batch)); })};
}

nb::object take_committed(const LeftHandle<LeftCommit>& handle) {
    const LeftCommit& left = *handle.left;
    if (!left.is_done.load(std::memory_order_acquire)) {
        return nb::none();
    }
    raise_if_not_ok(left.status);
    return to_bytes(left.outcomes);
}

// Holds the writer's lock until `until` can be read, and writes to the eventfd `told` when it has it. False: the file
// could not be read in time.
bool hold_writer(const Cache& cache, int told, int until, int timeout_ms) {
    return without_gil(cache, [&](CacheCore& core) {
        const auto held = core.hold_writer();
        eventfd_write(told, 1);
        pollfd file{.fd = until, .events = POLLIN, .revents = 0};
        return poll(&file, 1, timeout_ms) == 1;
    });
}

}  // namespace

void bind_left(nb::module_& module, nb::class_<Cache>& cache) {
    nb::class_<LeftHandle<LeftReservation>>(module, "LeftReservation");
    nb::class_<LeftHandle<LeftCommit>>(module, "LeftCommit");
    cache.def("leave_reserve", leave_reserve)
        .def("take_reserved", take_reserved)
        .def("leave_commit", leave_commit)
        .def("take_committed", [](const Cache&, const LeftHandle<LeftCommit>& left) { return take_committed(left); })
        .def("leave_abort",
             [](const Cache& self, SessionId session, nb::handle tickets) {
                 const auto numbers = copy_of<Ticket>(tickets);
                 without_gil(self, [&](CacheCore& core) { core.reservations().leave_abort(session, numbers); });
             })
        .def("leave_invalidate",
             [](const Cache& self, std::uint32_t name_space, std::uint32_t group, nb::handle hashes) {
                 const Space space = space_to_look_in(self, name_space, group);
                 const BufferView view(hashes);
                 const auto keys = hashes_of(view);
                 without_gil(self, [&](CacheCore& core) { core.removals().leave_invalidate(space, keys); });
             })
        .def("leave_tier_notes",
             [](const Cache& self, std::uint32_t name_space, std::uint32_t group, nb::handle hashes, nb::handle has) {
                 const Space space = space_to_look_in(self, name_space, group);
                 const BufferView names(hashes);
                 const BufferView notes(has);
                 const auto keys = hashes_of(names);
                 const auto flags = notes.bytes();
                 if (keys.size() != flags.size() * kHashBytes) {
                     throw nb::value_error("there must be a byte for each hash");
                 }
                 without_gil(self, [&](CacheCore& core) { core.removals().leave_tier_notes(space, keys, flags); });
             })
        .def("leave_evict",
             [](const Cache& self, const std::vector<std::uint32_t>& name_spaces) {
                 return without_gil(self, [&](CacheCore& core) { return core.removals().leave_evict(name_spaces); });
             })
        .def("is_evicting", [](const Cache& self) { return self.core()->removals().is_evicting(); });
    cache.def(
        "hold_writer", hold_writer,
        "For tests: has the writer's lock, and tells an eventfd so, until a file can be read. False: not in time.");
}

}  // namespace kvo

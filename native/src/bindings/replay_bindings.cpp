#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "replay/belady.hpp"
#include "replay/make_policy.hpp"
#include "replay/replay.hpp"
#include "replay/replay_memory.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

using Numbers = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Blocks = nb::ndarray<const BlockNumber, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MadeBlocks = nb::ndarray<nb::numpy, BlockNumber, nb::ndim<1>>;

ReplayShape make_shape(bool is_hybrid) { return is_hybrid ? hybrid_shape() : plain_shape(); }

// A trace, and how many replays of it run. They begin under the GIL, so none begins while requests are added.
struct Trace {
    ReplayTrace requests;
    std::atomic<std::uint32_t> replays = 0;
};

// While it lives, the GIL is released and no requests may be added to the trace.
class Replaying {
public:
    explicit Replaying(Trace& trace) : trace_(trace) { trace_.replays.fetch_add(1); }
    ~Replaying() { trace_.replays.fetch_sub(1); }
    Replaying(const Replaying&) = delete;
    Replaying& operator=(const Replaying&) = delete;

private:
    Trace& trace_;
    const WithoutGil unlocked_;
};

void check_ends(std::span<const std::uint64_t> ends, std::size_t id_count) {
    std::uint64_t begin = 0;
    for (const std::uint64_t end : ends) {
        if (end < begin || end > id_count) {
            throw nb::value_error(("ends must not fall and not pass the " + std::to_string(id_count) +
                                   " ids: " + std::to_string(end) + " follows " + std::to_string(begin))
                                      .c_str());
        }
        begin = end;
    }
    if (begin != id_count) {
        throw nb::value_error(
            ("the last end must be " + std::to_string(id_count) + ", as many as there are ids").c_str());
    }
}

void add_requests(Trace& trace, const Numbers& ids, const Numbers& ends) {
    const std::span<const std::uint64_t> all{ids.data(), ids.shape(0)};
    const std::span<const std::uint64_t> all_ends{ends.data(), ends.shape(0)};
    if (trace.replays.load() != 0) {
        throw nb::value_error("nothing can be added to a trace while a replay of it runs");
    }
    check_ends(all_ends, all.size());
    if (all.size() > std::numeric_limits<std::uint32_t>::max() - trace.requests.reference_count()) {
        throw nb::value_error("a trace may have 2**32 - 1 block references, this one would have more");
    }
    std::uint64_t begin = 0;
    for (const std::uint64_t end : all_ends) {
        raise_if_not_ok(trace.requests.add(all.subspan(begin, end - begin)));
        begin = end;
    }
}

nb::dict count_hits(Trace& trace, std::uint64_t capacity_blocks) {
    OptimalHits optimal;
    {
        const Replaying running(trace);
        optimal = count_optimal_hits(trace.requests, capacity_blocks);
    }
    nb::dict found;
    found["hits"] = optimal.hits;
    found["hit_squares"] = optimal.hit_squares;
    return found;
}

nb::dict replay_policy(Trace& trace, const std::string& policy_name, std::uint64_t capacity, bool is_hybrid) {
    const ReplayShape shape = make_shape(is_hybrid);
    auto policy = make_policy(policy_name, replay_bounds(shape, capacity));
    if (!policy.ok()) {
        raise_if_not_ok(policy.fault());
    }
    Status status;
    ReplayOutcome outcome;
    {
        const Replaying running(trace);
        const auto result = replay(trace.requests, shape, capacity, *policy.value());
        if (result.ok()) {
            outcome = result.value();
        } else {
            status = result.fault();
        }
    }
    raise_if_not_ok(status);
    nb::dict found;
    found["hits"] = outcome.hits;
    found["hit_squares"] = outcome.hit_squares;
    found["admitted"] = outcome.admitted;
    found["evicted"] = outcome.evicted;
    found["refused"] = outcome.refused;
    found["samples"] = outcome.samples;
    found["useless_share"] = outcome.useless_share;
    return found;
}

MadeBlocks list_request(const Trace& trace, std::size_t at) {
    if (at >= trace.requests.request_count()) {
        throw nb::index_error(("there are " + std::to_string(trace.requests.request_count()) + " requests").c_str());
    }
    const auto blocks = trace.requests.request(at);
    auto* const copy = new std::vector<BlockNumber>(blocks.begin(), blocks.end());
    const nb::capsule owner(copy, [](void* list) noexcept { delete static_cast<std::vector<BlockNumber>*>(list); });
    return MadeBlocks(copy->data(), {copy->size()}, owner);
}

// A memory over a trace, which lives as long. No requests may be added to the trace meanwhile.
class Memory {
public:
    Memory(Trace& trace, const std::string& policy_name, std::uint64_t capacity_blocks)
        : trace_(trace), memory_(trace.requests, capacity_blocks, make_new_policy(policy_name, capacity_blocks)) {
        trace_.replays.fetch_add(1);
    }
    ~Memory() { trace_.replays.fetch_sub(1); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::uint64_t used_blocks() const { return memory_.used_blocks(); }
    std::size_t count_prefix(const Blocks& blocks) const { return memory_.count_prefix(check(blocks)); }
    nb::bytes holds(const Blocks& blocks) const {
        std::string flags;
        for (const BlockNumber block : check(blocks)) {
            flags.push_back(memory_.holds(block) ? 1 : 0);
        }
        return nb::bytes(flags.data(), flags.size());
    }
    void touch(const Blocks& blocks) { memory_.touch(check(blocks)); }
    nb::tuple admit(const Blocks& blocks, const Blocks& held) {
        const auto made = memory_.admit(check(blocks), check(held));
        if (!made.ok()) {
            raise_if_not_ok(made.fault());
        }
        return nb::make_tuple(made.value().admitted, made.value().evicted, made.value().refused);
    }

private:
    static std::unique_ptr<EvictionPolicy> make_new_policy(const std::string& name, std::uint64_t capacity_blocks) {
        auto policy = make_policy(name, replay_bounds(plain_shape(), capacity_blocks));
        if (!policy.ok()) {
            raise_if_not_ok(policy.fault());
        }
        return std::move(policy.value());
    }

    std::span<const BlockNumber> check(const Blocks& blocks) const {
        const std::span<const BlockNumber> all{blocks.data(), blocks.shape(0)};
        for (const BlockNumber block : all) {
            if (block >= trace_.requests.block_count()) {
                throw nb::index_error(("the trace has no block " + std::to_string(block)).c_str());
            }
        }
        return all;
    }

    Trace& trace_;
    ReplayMemory memory_;
};

// A group: how it may be reused, bytes of a record, blocks of a window.
using GroupTerms = std::tuple<std::string, std::uint64_t, std::uint32_t>;

class Pool {
public:
    Pool(const std::vector<GroupTerms>& groups, const std::string& policy_name, std::uint64_t capacity_bytes)
        : pool_(make_pool(groups, policy_name, capacity_bytes)) {}

    std::uint64_t used_bytes() const { return pool_.used_bytes(); }
    nb::bytes holds(const Blocks& groups, const Numbers& names) const {
        std::string flags;
        for (const PoolRecord& record : pair(groups, names)) {
            flags.push_back(pool_.holds(record) ? 1 : 0);
        }
        return nb::bytes(flags.data(), flags.size());
    }
    void touch(const Blocks& groups, const Numbers& names) { pool_.touch(pair(groups, names)); }
    nb::tuple admit(const Blocks& groups, const Numbers& names, const Numbers& parents) {
        const std::vector<PoolRecord> records = pair(groups, names);
        if (parents.shape(0) != records.size()) {
            throw nb::value_error("there must be a parent for each record");
        }
        const auto made = pool_.admit(records, {parents.data(), parents.shape(0)});
        if (!made.ok()) {
            raise_if_not_ok(made.fault());
        }
        return nb::make_tuple(made.value().admitted, made.value().evicted, made.value().refused);
    }

private:
    static ReplayPool make_pool(const std::vector<GroupTerms>& groups, const std::string& policy_name,
                                std::uint64_t capacity_bytes) {
        ReplayShape shape;
        for (const auto& [reuse, size_bytes, window_blocks] : groups) {
            if (size_bytes == 0) {
                throw nb::value_error("a record has bytes");
            }
            shape.push_back({.reuse = find_reuse(reuse), .size_bytes = size_bytes, .window_blocks = window_blocks});
        }
        auto policy = make_policy(policy_name, replay_bounds(shape, capacity_bytes));
        if (!policy.ok()) {
            raise_if_not_ok(policy.fault());
        }
        return {std::move(shape), capacity_bytes, std::move(policy.value())};
    }

    static Reuse find_reuse(const std::string& name) {
        if (name == "prefix") {
            return Reuse::prefix;
        }
        if (name == "window") {
            return Reuse::window;
        }
        if (name == "exact") {
            return Reuse::exact;
        }
        throw nb::value_error("a group is reused by prefix, window or exact");
    }

    std::vector<PoolRecord> pair(const Blocks& groups, const Numbers& names) const {
        if (groups.shape(0) != names.shape(0)) {
            throw nb::value_error("there must be a group for each name");
        }
        std::vector<PoolRecord> records;
        records.reserve(names.shape(0));
        for (std::size_t at = 0; at < names.shape(0); ++at) {
            if (groups.data()[at] >= pool_.group_count() || names.data()[at] == 0) {
                throw nb::value_error("a record has one of the groups, and a name that is not 0");
            }
            records.push_back({groups.data()[at], names.data()[at]});
        }
        return records;
    }

    ReplayPool pool_;
};

nb::tuple list_policies() {
    nb::list names;
    for (const std::string_view name : policy_names()) {
        names.append(nb::str(name.data(), name.size()));
    }
    return nb::tuple(names);
}

}  // namespace

void bind_replay(nb::module_& module) {
    nb::class_<Trace>(module, "ReplayTrace", "Requests to replay; 4 bytes a reference, about 60 a block.")
        .def(nb::init<>())
        .def("add", add_requests, nb::arg("ids").noconvert(), nb::arg("ends").noconvert(),
             "Adds requests: the ids of their full blocks one after the other, and where each request's end. "
             "All of them, or none and a ValueError: the ends are none of these ids, or a replay of this trace runs.")
        .def_prop_ro("request_count", [](const Trace& trace) { return trace.requests.request_count(); })
        .def_prop_ro("reference_count", [](const Trace& trace) { return trace.requests.reference_count(); })
        .def_prop_ro("block_count", [](const Trace& trace) { return trace.requests.block_count(); })
        .def_prop_ro("reference_squares", [](const Trace& trace) { return trace.requests.reference_squares(); })
        .def("request", list_request, nb::arg("at"), "The numbers of a request's blocks, in order.")
        .def(
            "total_bytes",
            [](const Trace& trace, bool is_hybrid) { return total_bytes(trace.requests, make_shape(is_hybrid)); },
            nb::arg("is_hybrid"), "Of all distinct records, in the units of capacities.");
    nb::class_<Memory>(module, "ReplayMemory", "One of several memories of a replay, by the numbers of blocks.")
        .def(nb::init<Trace&, const std::string&, std::uint64_t>(), nb::arg("trace"), nb::arg("policy"),
             nb::arg("capacity_blocks"), nb::keep_alive<1, 2>())
        .def_prop_ro("used_blocks", &Memory::used_blocks)
        .def("count_prefix", &Memory::count_prefix, nb::arg("blocks"), "How many from the first one on are here.")
        .def("holds", &Memory::holds, nb::arg("blocks"), "A byte for each: 1 where it is here.")
        .def("touch", &Memory::touch, nb::arg("blocks"), "One request makes use of those that are here.")
        .def("admit", &Memory::admit, nb::arg("blocks"), nb::arg("held"),
             "Takes in what is not here, beside `held`, which stays: how many came, went, and did not fit.");
    nb::class_<Pool>(module, "ReplayPool", "A pool of records of several groups, kept in a policy's order.")
        .def(nb::init<const std::vector<GroupTerms>&, const std::string&, std::uint64_t>(), nb::arg("groups"),
             nb::arg("policy"), nb::arg("capacity_bytes"))
        .def_prop_ro("used_bytes", &Pool::used_bytes)
        .def("holds", &Pool::holds, nb::arg("groups"), nb::arg("names"), "A byte for each: 1 where it is here.")
        .def("touch", &Pool::touch, nb::arg("groups"), nb::arg("names"),
             "One request makes use of those that are here.")
        .def("admit", &Pool::admit, nb::arg("groups"), nb::arg("names"), nb::arg("parents"),
             "Takes in what is not here, parents first: how many came, went, and did not fit.");
    module.def("policy_names", list_policies, "The eviction policies that `replay` knows.");
    module.def("replay_policy", replay_policy, nb::arg("trace"), nb::arg("policy"), nb::arg("capacity"),
               nb::arg("is_hybrid"), "What a cache of that capacity would have served. The GIL is released.");
    module.def("count_optimal_hits", count_hits, nb::arg("trace"), nb::arg("capacity_blocks"),
               "What no policy can pass, full attention alone. The GIL is released.");
}

}  // namespace kvo

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <atomic>
#include <limits>
#include <span>
#include <string>

#include "bindings/bindings.hpp"
#include "evict/belady.hpp"
#include "evict/make_policy.hpp"
#include "evict/replay.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

using Numbers = nb::ndarray<const std::uint64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

ReplayShape make_shape(bool is_hybrid) { return is_hybrid ? hybrid_shape() : plain_shape(); }

// A trace, and how many replays of it run. They begin under the GIL, so none begins while requests are added.
struct Trace {
    ReplayTrace requests;
    std::atomic<std::uint32_t> replays = 0;
};

// Without the GIL, and nobody may add to the trace.
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

std::uint64_t count_hits(Trace& trace, std::uint64_t capacity_blocks) {
    const Replaying running(trace);
    return count_optimal_hits(trace.requests, capacity_blocks);
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
    found["admitted"] = outcome.admitted;
    found["evicted"] = outcome.evicted;
    found["refused"] = outcome.refused;
    found["samples"] = outcome.samples;
    found["useless_share"] = outcome.useless_share;
    return found;
}

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
        .def(
            "total_bytes",
            [](const Trace& trace, bool is_hybrid) { return total_bytes(trace.requests, make_shape(is_hybrid)); },
            nb::arg("is_hybrid"), "Of all distinct records, in the units of capacities.");
    module.def("policy_names", list_policies, "The eviction policies that `replay` knows.");
    module.def("replay_policy", replay_policy, nb::arg("trace"), nb::arg("policy"), nb::arg("capacity"),
               nb::arg("is_hybrid"), "What a cache of that capacity would have served. The GIL is released.");
    module.def("count_optimal_hits", count_hits, nb::arg("trace"), nb::arg("capacity_blocks"),
               "What no policy can pass, full attention alone. The GIL is released.");
}

}  // namespace kvo

#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "bench/cache_load.hpp"
#include "bench/line_walk.hpp"
#include "bench/turnover_load.hpp"
#include "bindings/bindings.hpp"
#include "shim/memory_headroom.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

constexpr double kTurnoverLimit = 1e6;

template <typename Work>
auto without_gil(Work work) {
    const WithoutGil unlocked;
    return work();
}

nb::tuple describe(const Timing& timing) { return nb::make_tuple(timing.seconds, timing.done); }

LoadShape shape_of(std::uint64_t entries, std::uint64_t record_bytes, const std::string& policy, unsigned threads) {
    LoadShape shape;
    shape.entries = entries;
    shape.record_bytes = record_bytes;
    shape.policy = policy;
    shape.threads = threads;
    return shape;
}

nb::list measure_steps(std::uint64_t entries, std::uint64_t record_bytes, const std::string& policy, unsigned threads,
                       std::uint64_t step) {
    const LoadShape shape = shape_of(entries, record_bytes, policy, threads);
    nb::list found;
    for (const GrowthStep& one : take(without_gil([&] { return measure_growth(shape, step); }))) {
        found.append(nb::make_tuple(one.entries, one.index_bytes, one.private_bytes));
    }
    return found;
}

nb::tuple race(CacheLoad& load, std::uint64_t calls, std::uint64_t wanted, const std::function<Timing()>& call) {
    const RaceOutcome outcome = without_gil([&] { return race_stores(load, calls, wanted, call); });
    return nb::make_tuple(to_bytes(outcome.seconds), outcome.stored);
}

void bind_loads(nb::module_& module) {
    nb::class_<LineWalk>(module, "LineWalk", "The limit of the index; native/src/bench/line_walk.hpp.")
        .def("__init__",
             [](LineWalk* self, std::uint64_t entries) {
                 new (self) LineWalk(take(without_gil([&] { return LineWalk::create(entries); })));
             })
        .def("walk", [](LineWalk& self, std::size_t batches, std::size_t hashes, bool counts_up) {
            if (hashes != 0 && batches > PTRDIFF_MAX / kHashBytes / hashes) {
                throw nb::value_error("so many hashes fit into no memory");
            }
            const auto second = counts_up ? LineWalk::Second::count_up : LineWalk::Second::read;
            return describe(without_gil([&] { return self.walk(batches, hashes, second); }));
        });
    nb::class_<CacheLoad>(module, "CacheLoad", "A cache under a load; native/src/bench/cache_load.hpp.")
        .def("store", [](CacheLoad& self,
                         std::uint64_t records) { return describe(without_gil([&] { return self.store(records); })); })
        .def("look_up",
             [](CacheLoad& self, std::size_t batches) {
                 return describe(without_gil([&] { return self.look_up(batches); }));
             })
        .def("acquire",
             [](CacheLoad& self, std::size_t chains, std::size_t blocks) {
                 return describe(without_gil([&] { return self.acquire(chains, blocks); }));
             })
        .def("acquire_missing",
             [](CacheLoad& self, std::size_t chains, std::size_t blocks) {
                 return describe(without_gil([&] { return self.acquire_missing(chains, blocks); }));
             })
        .def("walk", [](CacheLoad& self,
                        std::size_t batches) { return describe(without_gil([&] { return self.walk(batches); })); })
        .def("adopt", [](CacheLoad& self) { return describe(take(without_gil([&] { return self.adopt(); }))); })
        .def("index_bytes", [](const CacheLoad& self) { return self.stats().index_bytes; })
        .def("race_acquires",
             [](CacheLoad& self, std::uint64_t calls, std::size_t blocks) {
                 return race(self, calls, blocks, [&] { return self.acquire_newer(blocks); });
             })
        .def("race_walks",
             [](CacheLoad& self, std::uint64_t calls, std::size_t hashes, LineWalk& walk) {
                 return race(self, calls, hashes, [&] { return walk.walk(1, hashes, LineWalk::Second::count_up); });
             })
        .def("counts", [](const CacheLoad& self) {
            const CacheStats stats = without_gil([&] { return self.stats(); });
            return nb::make_tuple(stats.readable, stats.evicted, stats.capacity_bytes);
        });
}

nb::tuple run_turnovers(TurnoverLoad& load, double turnovers) {
    if (!(turnovers >= 0 && turnovers <= kTurnoverLimit)) {
        throw nb::value_error(("turnovers must be 0 to 1e6, not " + std::to_string(turnovers)).c_str());
    }
    const TurnoverOutcome outcome = without_gil([&] { return load.run(turnovers); });
    return nb::make_tuple(outcome.mean_usage, outcome.lowest_usage, outcome.offered_bytes, outcome.admitted_bytes,
                          outcome.moved_bytes, outcome.refused, outcome.seconds);
}

}  // namespace

void bind_bench(nb::module_& module) {
    bind_loads(module);
    module.def(
        "make_cache_load",
        [](std::uint64_t entries, std::uint64_t record_bytes, const std::string& policy, unsigned threads) {
            const LoadShape shape = shape_of(entries, record_bytes, policy, threads);
            return take(without_gil([&] { return CacheLoad::create(shape); }));
        },
        nb::kw_only(), nb::arg("entries"), nb::arg("record_bytes"), nb::arg("policy"), nb::arg("threads"));
    module.def(
        "make_sparse_load",
        [](std::uint64_t entries, std::uint64_t record_bytes, const std::string& policy, std::uint64_t segment_bytes,
           std::uint32_t sessions, std::uint32_t tenants) {
            LoadShape shape = shape_of(entries, record_bytes, policy, 1);
            shape.segment_bytes = segment_bytes;
            shape.is_sparse = true;
            shape.sessions = sessions;
            shape.tenants = tenants;
            return take(without_gil([&] { return CacheLoad::create(shape); }));
        },
        nb::kw_only(), nb::arg("entries"), nb::arg("record_bytes"), nb::arg("policy"), nb::arg("segment_bytes"),
        nb::arg("sessions"), nb::arg("tenants"));
    module.def("measure_growth", measure_steps, nb::kw_only(), nb::arg("entries"), nb::arg("record_bytes"),
               nb::arg("policy"), nb::arg("threads"), nb::arg("step"));
    nb::class_<TurnoverLoad>(module, "TurnoverLoad", "Records of several sizes; native/src/bench/turnover_load.hpp.")
        .def("run", run_turnovers)
        .def("flip", &TurnoverLoad::flip);
    module.def(
        "make_turnover_load",
        [](std::uint64_t pool_bytes, std::uint64_t segment_bytes, const std::vector<std::uint64_t>& record_bytes,
           const std::vector<double>& byte_shares, const std::string& policy, unsigned threads) {
            TurnoverShape shape;
            shape.pool_bytes = pool_bytes;
            shape.segment_bytes = segment_bytes;
            shape.record_bytes = record_bytes;
            shape.byte_shares = byte_shares;
            shape.policy = policy;
            shape.threads = threads;
            return take(without_gil([&] { return TurnoverLoad::create(shape); }));
        },
        nb::kw_only(), nb::arg("pool_bytes"), nb::arg("segment_bytes"), nb::arg("record_bytes"), nb::arg("byte_shares"),
        nb::arg("policy"), nb::arg("threads"));
    module.def(
        "read_memory_headroom",
        [](const std::string& proc) {
            const MemoryHeadroom headroom = read_memory_headroom(proc);
            return nb::make_tuple(headroom.bytes, headroom.limited_by, headroom.total_bytes);
        },
        nb::arg("proc"));
    module.def("memory_headroom_bytes", [] { return read_memory_headroom().bytes; });
    module.def("memory_total_bytes", [] { return read_memory_headroom().total_bytes; });
}

}  // namespace kvo

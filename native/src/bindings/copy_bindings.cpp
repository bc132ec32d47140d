#include <nanobind/ndarray.h>

#include <array>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/copy_handle.hpp"
#include "copy/cuda_engine.hpp"
#include "copy/host_copy.hpp"
#include "copy/host_engine.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

using Writable = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Readable = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::unique_ptr<OwnedCopyEngine> create_host_engine(std::uint64_t block_count, const std::vector<GroupTuple>& groups,
                                                    nb::object memory, unsigned threads, std::size_t plan_limit) {
    HostEngineTerms terms;
    terms.threads = threads;
    terms.limits.plans = plan_limit;
    auto engine = HostEngine::create(table_of(block_count, groups), std::move(terms));
    return std::make_unique<OwnedCopyEngine>(take(std::move(engine)), std::move(memory));
}

void copy_bytes(const Writable& to, const Readable& from, bool streams) {
    if (to.size() != from.size()) {
        throw nb::value_error("both must have the same size");
    }
    const WithoutGil unlocked;
    if (streams) {
        stream_copy(to.data(), {from.data(), from.size()});
        stream_fence();
    } else {
        std::memcpy(to.data(), from.data(), from.size());
    }
}

}  // namespace

void bind_copy(nb::module_& module) {
    nb::class_<OwnedCopyEngine>(module, "CopyEngine", "Copies blocks in the background, on one device or on the host.")
        .def("submit", &OwnedCopyEngine::submit, nb::arg("is_load"), nb::arg("has_digests"), nb::arg("groups"),
             nb::arg("blocks"), nb::arg("slots"), nb::arg("after").none())
        .def("poll", &OwnedCopyEngine::poll)
        .def("fence", &OwnedCopyEngine::fence)
        .def("close", &OwnedCopyEngine::close);
    module.def("create_host_engine", create_host_engine, nb::arg("block_count"), nb::arg("groups"), nb::arg("memory"),
               nb::arg("threads"), nb::arg("plan_limit"),
               "Starts threads that copy. `memory` is held until the engine is closed.");
    module.def("copy_bytes", copy_bytes, nb::arg("target").noconvert(), nb::arg("source").noconvert(),
               nb::arg("streams"),
               "One plain copy by this thread, around the caches or through them: what engines are measured against.");
}

namespace {

constexpr std::array<std::pair<const char*, CopyWay>, 3> kWays = {
    {{"batch", CopyWay::batch}, {"staged", CopyWay::staged}, {"mapped", CopyWay::mapped}}};

CopyWay way_of(const std::string& name) {
    for (const auto& [known, way] : kWays) {
        if (name == known) {
            return way;
        }
    }
    throw nb::value_error(("a way is batch, staged or mapped, not " + name).c_str());
}

// For loads or not, bytes of a run, runs, and the way.
using RuleTuple = std::tuple<bool, std::uint64_t, std::uint64_t, std::string>;

// A place in a stream's work, as Python holds it. The engine stays for as long as this.
struct StreamPoint {
    SharedEvent event;
};

class OwnedCudaEngine final : public OwnedCopyEngine {
public:
    OwnedCudaEngine(std::unique_ptr<CudaEngine> engine, nb::object memory)
        : OwnedCopyEngine(std::move(engine), std::move(memory)), engine_(static_cast<CudaEngine&>(copy_engine())) {}

    void add_host_range(std::uint64_t address, std::uint64_t length) {
        check_process();
        raise_if_not_ok(engine_.add_host_range(address, length));
    }

    void remove_host_range(std::uint64_t address, std::uint64_t length) {
        check_process();
        raise_if_not_ok(engine_.remove_host_range(address, length));
    }

    // Bytes asked for, bytes registered, whether nothing waits to be, whether removed ones still are, and why some stay
    // as they are.
    std::tuple<std::uint64_t, std::uint64_t, bool, bool, std::string> registration() const {
        check_process();
        const RegistrationProgress progress = engine_.registration();
        return {progress.asked_bytes, progress.registered_bytes, progress.is_done, progress.is_leaving,
                progress.problem};
    }

    void wait_registered(std::uint64_t bytes, int timeout_ms) {
        check_process();
        const WithoutGil unlocked;
        engine_.wait_registered(bytes, timeout_ms);
    }

    StreamPoint mark(ComputeStream stream) {
        check_process();
        const auto marked = [&] {
            const WithoutGil unlocked;
            return engine_.mark(stream);
        };
        return {kvo::take(marked())};
    }

    CopyTicket submit_after(bool is_load, bool has_digests, nb::handle groups, nb::handle blocks, nb::handle slots,
                            const StreamPoint& point) {
        check_process();
        CopyPlan plan = make_plan(is_load, has_digests, groups, blocks, slots);
        const auto submitted = [&] {
            const WithoutGil unlocked;
            return engine_.submit_after(std::move(plan), point.event);
        };
        return kvo::take(submitted());
    }

    void set_ways(const std::vector<RuleTuple>& rules) {
        check_process();
        WayTable table;
        for (const auto& [is_load, run_bytes, runs, way] : rules) {
            table.push_back({is_load ? CopyDirection::load : CopyDirection::save, run_bytes, runs, way_of(way)});
        }
        engine_.set_ways(std::move(table));
    }

    std::string kernel_problem() const {
        check_process();
        return engine_.kernel_problem();
    }

    bool is_lost() const { return engine_.is_lost(); }

    void make_wait(ComputeStream stream, CopyTicket ticket, int timeout_ms) {
        check_process();
        const auto waited = [&] {
            const WithoutGil unlocked;
            return engine_.make_wait(stream, ticket, timeout_ms);
        };
        raise_if_not_ok(waited());
    }

private:
    CudaEngine& engine_;
};

std::unique_ptr<OwnedCudaEngine> create_cuda_engine(std::uint64_t block_count, const std::vector<GroupTuple>& groups,
                                                    nb::object memory, int device, std::size_t plan_limit,
                                                    const std::optional<std::string>& library) {
    CudaSettings settings;
    settings.device = device;
    settings.limits.plans = plan_limit;
    PageTable pages = table_of(block_count, groups);
    const auto opened = [&]() -> Result<std::unique_ptr<CudaEngine>> {
        const WithoutGil unlocked;
        const Result<CudaApi> api = CudaApi::load(library.value_or(kCudaLibrary));
        return api.ok() ? CudaEngine::open(api.value(), settings, std::move(pages)) : api.fault();
    };
    return std::make_unique<OwnedCudaEngine>(take(opened()), std::move(memory));
}

}  // namespace

void bind_cuda(nb::module_& module) {
    nb::class_<StreamPoint>(module, "StreamPoint", "What a stream had been given when it was marked.");
    nb::class_<OwnedCudaEngine, OwnedCopyEngine>(module, "CudaCopyEngine", "Copies blocks of one GPU's memory.")
        .def("mark", &OwnedCudaEngine::mark, nb::keep_alive<0, 1>())
        .def("submit_after", &OwnedCudaEngine::submit_after)
        .def("add_host_range", &OwnedCudaEngine::add_host_range)
        .def("remove_host_range", &OwnedCudaEngine::remove_host_range)
        .def("registration", &OwnedCudaEngine::registration)
        .def("wait_registered", &OwnedCudaEngine::wait_registered)
        .def("set_ways", &OwnedCudaEngine::set_ways)
        .def("kernel_problem", &OwnedCudaEngine::kernel_problem)
        .def("is_lost", &OwnedCudaEngine::is_lost)
        .def("make_wait", &OwnedCudaEngine::make_wait);
    module.def("create_cuda_engine", create_cuda_engine, nb::arg("block_count"), nb::arg("groups"), nb::arg("memory"),
               nb::arg("device"), nb::arg("plan_limit"), nb::arg("library").none(),
               "Takes the GPU's primary context and starts threads that copy. `memory` is held until it is closed.");
}

}  // namespace kvo

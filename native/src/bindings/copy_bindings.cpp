#include <nanobind/ndarray.h>

#include <cstring>
#include <memory>
#include <utility>

#include "bindings/copy_handle.hpp"
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

}  // namespace kvo

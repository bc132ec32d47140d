#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include "bindings/bindings.hpp"
#include "copy/kernel_image.hpp"
#include "hash/sha256.hpp"
#include "io/uring_engine.hpp"
#include "shim/connections.hpp"
#include "shim/cpu_features.hpp"
#include "shim/cuda_driver.hpp"
#include "shim/host_memory.hpp"
#include "shim/thread_turns.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

template <typename Items, typename Convert>
nb::tuple to_tuple(const Items& items, Convert convert) {
    nb::list list;
    for (const auto& item : items) {
        list.append(convert(item));
    }
    return nb::tuple(list);
}

nb::dict probe(bool probe_devices) {
    CudaFindings cuda;
    HostMemory memory;
    Status io_uring;
    {
        const WithoutGil unlocked;
        cuda = find_cuda(probe_devices);
        memory = read_host_memory();
        io_uring = probe_io_uring();
    }
    const auto same = [](const auto& item) { return item; };
    nb::dict found;
    found["architecture"] = cpu_architecture();
    found["cpu_features"] = to_tuple(cpu_features().names(), same);
    found["sha256_path"] = sha256_path().name;
    found["kernel_archs"] = to_tuple(kernel_archs(), same);
    found["cuda_version"] = cuda.version ? nb::object(nb::int_(*cuda.version)) : nb::none();
    found["cuda_problem"] = cuda.problem;
    found["cuda_devices"] =
        cuda.devices
            ? nb::object(to_tuple(*cuda.devices,
                                  [](const CudaDevice& device) {
                                      return nb::make_tuple(device.name, device.compute_major, device.compute_minor);
                                  }))
            : nb::none();
    found["io_uring_problem"] = io_uring.message();
    found["page_bytes"] = memory.page_bytes;
    found["huge_pages"] = to_tuple(memory.huge_pages, [](const HugePagePool& pool) {
        return nb::make_tuple(pool.page_bytes, pool.total, pool.free);
    });
    found["transparent_huge_pages"] = memory.transparent_huge_pages;
    found["transparent_huge_pages_in_shmem"] = memory.transparent_huge_pages_in_shmem;
    found["numa_nodes"] = memory.numa_nodes;
    return found;
}

}  // namespace

void bind_capabilities(nb::module_& module) {
    module.def("probe", probe, nb::arg("probe_devices"),
               "What this build and this machine can do. Initialises CUDA only if asked for devices.");
    module.def("take_short_turns", take_short_turns,
               "Asks the kernel for short turns of the calling thread, so that it runs soon after it wakes.");
    module.def("accept_open", accept_open, nb::arg("listener"),
               "Accepts the next connection that is still open. Minus an error number: there is none.");
}

}  // namespace kvo

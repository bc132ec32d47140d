#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "arena/segment.hpp"
#include "bindings/bindings.hpp"
#include "bindings/cache_values.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

// The mapping lives as long as this or a view of it.
struct SharedSegmentMap {
    std::shared_ptr<const SegmentMap> map;
    pid_t process = getpid();

    const SegmentMap& get() const {
        if (getpid() != process) {
            throw nb::value_error("the segments are mapped in the process that opened them, and this is a child of it");
        }
        return *map;
    }
};

std::unique_ptr<SharedSegmentMap> open_segment_map(const std::vector<int>& files, std::uint64_t segment_bytes) {
    std::vector<FileDescriptor> taken;
    taken.reserve(files.size());
    for (const int file : files) {
        taken.emplace_back(file);
    }
    auto opened = [&] {
        const WithoutGil unlocked;
        return SegmentMap::open(std::move(taken), segment_bytes);
    }();
    auto shared = std::make_unique<SharedSegmentMap>();
    shared->map = take(std::move(opened));
    return shared;
}

nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> view_bytes(const SharedSegmentMap& self, std::uint64_t address,
                                                             std::uint64_t size) {
    const std::span<std::byte> bytes = take(self.get().find(address, size));
    const nb::capsule owner(new std::shared_ptr<const SegmentMap>(self.map),
                            [](void* held) noexcept { delete static_cast<std::shared_ptr<const SegmentMap>*>(held); });
    return {reinterpret_cast<std::uint8_t*>(bytes.data()), {size}, owner};
}

}  // namespace

void bind_segment_map(nb::module_& module) {
    nb::class_<SharedSegmentMap>(module, "SegmentMap", "A cache's segments as another process of it sees them.")
        .def("view", view_bytes, nb::rv_policy::reference)
        .def("bases", [](const SharedSegmentMap& self) { return self.get().bases(); });
    module.def("open_segment_map", open_segment_map, nb::arg("files"), nb::arg("segment_bytes"),
               "Maps segments for reading and writing. Takes the descriptors.");
}

}  // namespace kvo

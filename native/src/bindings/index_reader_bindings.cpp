#include "cache/index_reader.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <memory>
#include <utility>
#include <vector>

#include "arena/segment.hpp"
#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace kvo {

void bind_index_reader(nb::module_& module) {
    nb::class_<IndexReader>(module, "IndexReader", "Look-ups in the index of another process.")
        .def("lookup",
             [](const IndexReader& self, std::uint32_t name_space, std::uint32_t group, nb::handle hashes) {
                 const Space space = space_of(name_space, group);
                 const BufferView view(hashes);
                 std::vector<std::uint8_t> found(view.bytes().size() / kHashBytes);
                 Status status;
                 {
                     const WithoutGil unlocked;
                     status = self.lookup(space, view.bytes(), found);
                 }
                 raise_if_not_ok(status);
                 return to_bytes(found);
             })
        .def("find_boundary",
             [](IndexReader& self, std::uint32_t name_space, nb::handle chain, std::uint64_t local, std::uint64_t limit,
                std::uint64_t alignment) {
                 const BufferView view(chain);
                 const BoundaryQuery query{name_space, view.bytes(), local, limit, alignment};
                 auto found = [&] {
                     const WithoutGil unlocked;
                     return self.find_boundary(query);
                 }();
                 return take(std::move(found));
             })
        .def("version", &IndexReader::version)
        .def("used_bytes", &IndexReader::used_bytes)
        .def("ready_bytes", &IndexReader::ready_bytes)
        .def("leaving_from", &IndexReader::leaving_from)
        .def("mark_pinned", [](const IndexReader& self, std::uint32_t segment,
                               bool is_pinned) { raise_if_not_ok(self.mark_pinned(segment, is_pinned)); })
        .def("boot_id", &IndexReader::boot_id);
    module.def(
        "open_index_reader", [](int file) { return take(IndexReader::open(FileDescriptor(file))); }, nb::arg("file"),
        "Maps an index read-only. Takes the descriptor.");
}

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

#include "cache/index_reader.hpp"

#include <nanobind/stl/unique_ptr.h>

#include "bindings/bindings.hpp"
#include "bindings/buffer_view.hpp"
#include "bindings/cache_values.hpp"

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
        .def("boot_id", &IndexReader::boot_id);
    module.def(
        "open_index_reader", [](int file) { return take(IndexReader::open(FileDescriptor(file))); }, nb::arg("file"),
        "Maps an index read-only. Takes the descriptor.");
}

}  // namespace kvo

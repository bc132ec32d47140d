#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <limits>
#include <optional>
#include <span>
#include <string>

#include "bindings/bindings.hpp"
#include "hash/block_hash.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

using Array = nb::ndarray<nb::ro, nb::device::cpu>;

std::span<const std::uint8_t> view(const nb::bytes& bytes) {
    return {static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
}

// Checked here, not by the signature, so that a wrong array is a ValueError that says what is wrong with it.
template <typename Number>
std::span<const Number> view_array(const Array& array, const char* name, const char* dtype) {
    if (array.dtype() != nb::dtype<Number>()) {
        throw nb::value_error((std::string(name) + " must have dtype " + dtype).c_str());
    }
    if (array.ndim() != 1) {
        throw nb::value_error(
            (std::string(name) + " must have 1 dimension, not " + std::to_string(array.ndim())).c_str());
    }
    if (array.shape(0) > 1 && array.stride(0) != 1) {
        throw nb::value_error((std::string(name) + " must be contiguous").c_str());
    }
    return {static_cast<const Number*>(array.data()), array.shape(0)};
}

// Returns uninitialised bytes. Only the caller has them until it returns them, so it may fill them without the GIL.
nb::bytes make_bytes(std::size_t size) {
    PyObject* const object = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size));
    if (object == nullptr) {
        throw nb::python_error();
    }
    return nb::steal<nb::bytes>(object);
}

std::span<std::uint8_t> fill(nb::bytes& bytes) {
    return {reinterpret_cast<std::uint8_t*>(PyBytes_AsString(bytes.ptr())), bytes.size()};
}

nb::bytes hash_blocks_of_arrays(const Array& tokens, std::int64_t block_size, const nb::bytes& parent,
                                const nb::bytes& extras, const std::optional<Array>& extra_ends) {
    if (block_size < 1 || block_size > std::numeric_limits<std::uint32_t>::max()) {
        throw nb::value_error(("block_size must be 1 to 2**32 - 1, not " + std::to_string(block_size)).c_str());
    }
    if (parent.size() != kDigestBytes) {
        throw nb::value_error(("parent must have 32 bytes, not " + std::to_string(parent.size())).c_str());
    }
    const auto size = static_cast<std::uint32_t>(block_size);
    const auto token_view = view_array<std::uint32_t>(tokens, "tokens", "uint32");
    BlockExtras extra_view{view(extras), {}};
    if (extra_ends) {
        extra_view.ends = view_array<std::uint64_t>(*extra_ends, "extra_ends", "uint64");
    }
    nb::bytes digests = make_bytes(full_blocks(token_view.size(), size) * kDigestBytes);
    const auto parent_view = view(parent).first<kDigestBytes>();
    const auto out = fill(digests);
    Status status;
    {
        const WithoutGil unlocked;
        status = hash_blocks(token_view, size, parent_view, extra_view, out);
    }
    raise_if_not_ok(status);
    return digests;
}

nb::bytes sha256_of_buffer(nb::handle data) {
    const BufferView buffer(data);
    Digest digest;
    {
        const WithoutGil unlocked;
        digest = sha256(buffer.bytes());
    }
    return nb::bytes(digest.data(), digest.size());
}

}  // namespace

void bind_hash(nb::module_& module) {
    module.def(
        "hash_blocks", hash_blocks_of_arrays, nb::arg("tokens").noconvert(), nb::arg("block_size"), nb::arg("parent"),
        nb::arg("extras") = nb::bytes("", 0), nb::arg("extra_ends").noconvert() = nb::none(),
        "Digests of all full blocks of `tokens`, 32 bytes each, chained from `parent`. Block i's extra bytes end "
        "at `extra_ends[i]` of `extras`. The GIL is released: nobody may change the arrays meanwhile. "
        "ValueError says what is wrong with an argument.");
    module.def("sha256", sha256_of_buffer, nb::arg("data"), "SHA-256 of a bytes-like object.");
}

}  // namespace kvo

#include "bindings/seal_handle.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

std::span<const std::uint8_t, 32> view_32(const nb::bytes& bytes) {
    if (bytes.size() != 32) {
        throw nb::value_error("keys, fingerprints and hashes have 32 bytes");
    }
    return std::span<const std::uint8_t, 32>(static_cast<const std::uint8_t*>(bytes.data()), 32);
}

void make_keys(SealKeysHandle* handle, const std::vector<nb::bytes>& keys) {
    std::vector<SealKey> all(keys.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        std::memcpy(all[i].data(), view_32(keys[i]).data(), all[i].size());
    }
    SealKeys made = take(SealKeys::make(all));
    new (handle) SealKeysHandle{std::make_shared<const SealKeys>(std::move(made))};
}

nb::bytes seal(const SealKeysHandle& handle, nb::handle payload, bool is_coded, std::uint64_t digest,
               std::uint64_t record_bytes, const nb::bytes& fingerprint, const nb::bytes& block_hash,
               std::uint32_t group, std::uint32_t shard, const nb::bytes& parent) {
    const SealedName name{{view_32(fingerprint), view_32(block_hash), group, shard}, view_32(parent), record_bytes};
    const BufferView bytes(payload);
    const std::size_t size = bytes.bytes().size() + kSealOverheadBytes;
    auto sealed = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!sealed.is_valid()) {
        throw nb::python_error();
    }
    auto* const target = reinterpret_cast<std::uint8_t*>(PyBytes_AsString(sealed.ptr()));
    Status status;
    {
        const WithoutGil unlocked;
        const SealedForm form = is_coded ? SealedForm::coded : SealedForm::plain;
        status = handle.keys->seal(name, digest, form, bytes.bytes(), {target, size});
    }
    raise_if_not_ok(status);
    return sealed;
}

std::optional<std::uint64_t> open(const SealKeysHandle& handle, nb::handle sealed, nb::handle record,
                                  std::uint64_t number, const nb::bytes& fingerprint, const nb::bytes& block_hash,
                                  std::uint32_t group, std::uint32_t shard, const nb::bytes& parent) {
    const BufferView source(sealed);
    const WritableBufferView target(record);
    const SealedName name{
        {view_32(fingerprint), view_32(block_hash), group, shard}, view_32(parent), target.bytes().size()};
    const WithoutGil unlocked;
    const std::optional<SealedParts> parts = split_sealed(source.bytes());
    std::vector<std::uint8_t> scratch;
    return parts ? handle.keys->open(number, name, *parts, target.bytes(), scratch) : std::nullopt;
}

}  // namespace

void bind_seal(nb::module_& module) {
    nb::class_<SealKeysHandle>(module, "SealKeys", "Keys that seal records outside the server's memory.")
        .def("__init__", &make_keys, nb::arg("keys"),
             "Keys of 32 bytes: the first one seals, all of them open. RuntimeError: the machine has no libcrypto.")
        .def_prop_ro("sealing", [](const SealKeysHandle& handle) { return handle.keys->sealing(); })
        .def(
            "has", [](const SealKeysHandle& handle, std::uint64_t number) { return handle.keys->has(number); },
            nb::arg("number"))
        .def("seal", &seal, nb::arg("payload"), nb::kw_only(), nb::arg("is_coded"), nb::arg("digest"),
             nb::arg("record_bytes"), nb::arg("fingerprint"), nb::arg("block_hash"), nb::arg("group"), nb::arg("shard"),
             nb::arg("parent"), "Returns the sealed record. The GIL is released.")
        .def("open", &open, nb::arg("sealed"), nb::arg("record"), nb::kw_only(), nb::arg("number"),
             nb::arg("fingerprint"), nb::arg("block_hash"), nb::arg("group"), nb::arg("shard"), nb::arg("parent"),
             "Opens a sealed record to `record`, and returns its digest. None: it is not what was sealed under this "
             "name, or the key is missing; what `record` has is worth nothing then. The GIL is released.");
    module.attr("SEAL_OVERHEAD_BYTES") = kSealOverheadBytes;
}

}  // namespace kvo

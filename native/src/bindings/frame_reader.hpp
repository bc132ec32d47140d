// Reads one frame from its first byte on. Wrong or unusual frames throw NotPlain.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <vector>

#include "bindings/frame_shape.hpp"

namespace kvo::frames {

class Reader : public PlainReader {
public:
    using PlainReader::PlainReader;

    nanobind::object read(const Kind& kind) {
        switch (kind.is) {
            case Kind::Is::whole: {
                const std::uint64_t value = whole();
                if (value < kind.minimum || value > kind.maximum) {
                    throw NotPlain{};
                }
                return nanobind::steal(PyLong_FromUnsignedLongLong(value));
            }
            case Kind::Is::truth:
                return nanobind::borrow(truth() ? Py_True : Py_False);
            case Kind::Is::choice: {
                const auto key = nanobind::steal(PyLong_FromUnsignedLongLong(whole()));
                PyObject* found = PyDict_GetItemWithError(kind.names.ptr(), key.ptr());
                if (found == nullptr) {
                    throw NotPlain{};
                }
                return nanobind::borrow(found);
            }
            case Kind::Is::blob: {
                const std::span<const std::uint8_t> found = blob();
                check_blob(kind, found.size());
                return nanobind::steal(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(found.data()),
                                                                 static_cast<Py_ssize_t>(found.size())));
            }
            case Kind::Is::several: {
                const std::size_t count = array(kind.maximum);
                auto items = nanobind::steal(PyTuple_New(static_cast<Py_ssize_t>(count)));
                for (std::size_t at = 0; at < count; ++at) {
                    PyTuple_SetItem(items.ptr(), static_cast<Py_ssize_t>(at), read(kind.item[0]).release().ptr());
                }
                return items;
            }
            case Kind::Is::shape:
                return record(kind.shape[0], array(kArrayItems));
        }
        throw NotPlain{};
    }

    // Reads a record that has as many items as the shape has fields: more or fewer are another version's.
    nanobind::object record(const Shape& shape, std::size_t items) {
        if (items != shape.fields.size()) {
            throw NotPlain{};
        }
        auto* type = reinterpret_cast<PyTypeObject*>(shape.record.ptr());
        const auto make = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
        auto made = nanobind::steal(make(type, 0));
        if (!made.is_valid()) {
            throw nanobind::python_error();
        }
        std::vector<nanobind::object> counted;
        for (const auto& [name, kind] : shape.fields) {
            nanobind::object value = read(kind);
            // A frozen dataclass refuses its own setter. A whole dictionary instead is not seen by Python 3.13.
            if (PyObject_GenericSetAttr(made.ptr(), name.ptr(), value.ptr()) != 0) {
                throw nanobind::python_error();
            }
            if (!shape.counts.empty()) {
                counted.push_back(std::move(value));
            }
        }
        check_counts(shape, counted);
        return made;
    }
};

}  // namespace kvo::frames

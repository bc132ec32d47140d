// One frame to its last byte. A value that its reader would refuse is NotPlain.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/frame_shape.hpp"

namespace kvo::frames {

class Writer : public PlainWriter {
public:
    void write(const Kind& kind, nanobind::handle value) {
        switch (kind.is) {
            case Kind::Is::whole: {
                const std::uint64_t found = to_whole(value);
                if (found < kind.minimum || found > kind.maximum) {
                    throw NotPlain{};
                }
                whole(found);
                return;
            }
            case Kind::Is::truth:
                if (value.ptr() != Py_True && value.ptr() != Py_False) {
                    throw NotPlain{};
                }
                truth(value.ptr() == Py_True);
                return;
            case Kind::Is::choice:
                if (value.type().ptr() != kind.type.ptr()) {
                    throw NotPlain{};
                }
                whole(PyLong_AsUnsignedLongLong(value.ptr()));
                return;
            case Kind::Is::blob: {
                if (!PyBytes_CheckExact(value.ptr())) {
                    throw NotPlain{};
                }
                const std::size_t size = blob_size(value);
                check_blob(kind, size);
                blob({PyBytes_AsString(value.ptr()), size});
                return;
            }
            case Kind::Is::several: {
                if (!PyTuple_CheckExact(value.ptr())) {
                    throw NotPlain{};
                }
                const auto count = static_cast<std::size_t>(PyTuple_Size(value.ptr()));
                if (count > kind.maximum) {
                    throw NotPlain{};
                }
                array(count);
                for (std::size_t at = 0; at < count; ++at) {
                    write(kind.item[0], PyTuple_GetItem(value.ptr(), static_cast<Py_ssize_t>(at)));
                }
                return;
            }
            case Kind::Is::shape:
                array(kind.shape[0].fields.size());
                record(kind.shape[0], value);
                return;
        }
    }

    void record(const Shape& shape, nanobind::handle value) {
        if (value.type().ptr() != shape.record.ptr()) {
            throw NotPlain{};
        }
        std::vector<nanobind::object> counted;
        for (const auto& [name, kind] : shape.fields) {
            nanobind::object item = nanobind::steal(PyObject_GetAttr(value.ptr(), name.ptr()));
            if (!item.is_valid()) {
                throw nanobind::python_error();
            }
            write(kind, item);
            if (!shape.counts.empty()) {
                counted.push_back(std::move(item));
            }
        }
        check_counts(shape, counted);
    }

    static std::uint64_t to_whole(nanobind::handle value) {
        if (!PyLong_CheckExact(value.ptr())) {
            throw NotPlain{};
        }
        const std::uint64_t found = PyLong_AsUnsignedLongLong(value.ptr());
        if (found == ~std::uint64_t{0} && PyErr_Occurred() != nullptr) {
            PyErr_Clear();
            throw NotPlain{};
        }
        return found;
    }
};

}  // namespace kvo::frames

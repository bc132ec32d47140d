// One frame from its first byte on. Whatever is wrong or unusual is NotPlain.
#pragma once

#include <nanobind/nanobind.h>

#include <span>

#include "bindings/frame_shape.hpp"

namespace kvo::frames {

class Reader {
public:
    explicit Reader(std::span<const std::uint8_t> bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

    bool at_end() const { return at_ == end_; }

    std::size_t array(std::size_t limit) {
        const std::uint8_t mark = *take(1);
        const std::size_t count = (mark & 0xf0) == 0x90 ? mark & 0x0f : mark == 0xdc ? number(2) : kArrayItems + 1;
        if (count > kArrayItems || count > limit) {
            throw NotPlain{};
        }
        return count;
    }

    std::uint64_t whole() {
        const std::uint8_t mark = *take(1);
        if (mark < 0x80) {
            return mark;
        }
        if (mark < 0xcc || mark > 0xcf) {
            throw NotPlain{};
        }
        return number(std::size_t{1} << (mark - 0xcc));
    }

    nanobind::object read(const Kind& kind) {
        switch (kind.is) {
            case Kind::Is::whole: {
                const std::uint64_t value = whole();
                if (value < kind.minimum || value > kind.maximum) {
                    throw NotPlain{};
                }
                return nanobind::steal(PyLong_FromUnsignedLongLong(value));
            }
            case Kind::Is::truth: {
                const std::uint8_t mark = *take(1);
                if (mark != 0xc2 && mark != 0xc3) {
                    throw NotPlain{};
                }
                return nanobind::borrow(mark == 0xc3 ? Py_True : Py_False);
            }
            case Kind::Is::choice: {
                const auto key = nanobind::steal(PyLong_FromUnsignedLongLong(whole()));
                PyObject* found = PyDict_GetItemWithError(kind.names.ptr(), key.ptr());
                if (found == nullptr) {
                    throw NotPlain{};
                }
                return nanobind::borrow(found);
            }
            case Kind::Is::blob: {
                const std::uint8_t mark = *take(1);
                if (mark < 0xc4 || mark > 0xc6) {
                    throw NotPlain{};
                }
                const auto size = static_cast<std::size_t>(number(std::size_t{1} << (mark - 0xc4)));
                check_blob(kind, size);
                const char* data = reinterpret_cast<const char*>(take(size));
                return nanobind::steal(PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(size)));
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

    // As many items as it has fields: more or fewer are another version's.
    nanobind::object record(const Shape& shape, std::size_t items) {
        if (items != shape.fields.size()) {
            throw NotPlain{};
        }
        const auto values = nanobind::steal(PyDict_New());
        std::vector<nanobind::object> counted;
        for (const auto& [name, kind] : shape.fields) {
            nanobind::object value = read(kind);
            PyDict_SetItem(values.ptr(), name.ptr(), value.ptr());
            if (!shape.counts.empty()) {
                counted.push_back(std::move(value));
            }
        }
        check_counts(shape, counted);
        auto* type = reinterpret_cast<PyTypeObject*>(shape.record.ptr());
        const auto make = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc));
        auto made = nanobind::steal(make(type, 0));
        // A frozen dataclass refuses its own setter, so all attributes come at once.
        if (!made.is_valid() || PyObject_GenericSetDict(made.ptr(), values.ptr(), nullptr) != 0) {
            throw nanobind::python_error();
        }
        return made;
    }

private:
    const std::uint8_t* take(std::size_t size) {
        if (static_cast<std::size_t>(end_ - at_) < size) {
            throw NotPlain{};
        }
        return std::exchange(at_, at_ + size);
    }

    std::uint64_t number(std::size_t size) {
        std::uint64_t value = 0;
        for (const std::uint8_t* byte = take(size); size-- > 0; ++byte) {
            value = value << 8 | *byte;
        }
        return value;
    }

    const std::uint8_t* at_;
    const std::uint8_t* end_;
};

}  // namespace kvo::frames

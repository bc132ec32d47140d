// Anything with the buffer protocol, seen as bytes.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvo {

// The bytes stay where they are for as long as this lives, also without the GIL; to make and to destroy it takes the
// GIL. A BufferError if they have gaps, a TypeError if the object has none.
class BufferView {
public:
    explicit BufferView(nanobind::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) {
            throw nanobind::python_error();
        }
    }
    ~BufferView() { PyBuffer_Release(&buffer_); }
    BufferView(const BufferView&) = delete;
    BufferView& operator=(const BufferView&) = delete;

    std::span<const std::uint8_t> bytes() const {
        return {static_cast<const std::uint8_t*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
    }

private:
    Py_buffer buffer_;
};

// The same for bytes that are written to. A BufferError if they may not be.
class WritableBufferView {
public:
    explicit WritableBufferView(nanobind::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_WRITABLE) != 0) {
            throw nanobind::python_error();
        }
    }
    ~WritableBufferView() { PyBuffer_Release(&buffer_); }
    WritableBufferView(const WritableBufferView&) = delete;
    WritableBufferView& operator=(const WritableBufferView&) = delete;

    std::span<std::uint8_t> bytes() const {
        return {static_cast<std::uint8_t*>(buffer_.buf), static_cast<std::size_t>(buffer_.len)};
    }

private:
    Py_buffer buffer_;
};

}  // namespace kvo

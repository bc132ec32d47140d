// The functions by which each file of this folder adds to the module, and code that they share.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "index/layout.hpp"

namespace kvo {

void bind_hash(nanobind::module_& module);
void bind_digest(nanobind::module_& module);
void bind_codec(nanobind::module_& module);
void bind_disk(nanobind::module_& module);
void bind_frames(nanobind::module_& module);
void bind_express(nanobind::module_& module);
void bind_link(nanobind::module_& module);
void bind_seal(nanobind::module_& module);
void bind_replay(nanobind::module_& module);
void bind_cache(nanobind::module_& module);
void bind_index_reader(nanobind::module_& module);
void bind_copy(nanobind::module_& module);
void bind_cuda(nanobind::module_& module);
void bind_segment_map(nanobind::module_& module);
void bind_bench(nanobind::module_& module);
void bind_capabilities(nanobind::module_& module);

// Before 3.14 Python ends a thread that asks for the GIL of an ending interpreter by pthread_exit, which unwinds
// through noexcept code and so ends the process. When Python is about to end, module.cpp notes the thread that ends it
// here, and waits for those that are on their way back; no other one comes back from then on.
struct PythonEnd {
    std::atomic<bool> has_begun = false;
    std::thread::id thread;  // set before `has_begun`
    std::atomic<std::uint32_t> returning = 0;
};
inline PythonEnd python_end;

// Releases the GIL for as long as it lives.
class WithoutGil {
public:
    WithoutGil() : state_(PyEval_SaveThread()) { is_released_ = true; }
    ~WithoutGil() {
        python_end.returning.fetch_add(1);
        if (python_end.has_begun.load() && python_end.thread != std::this_thread::get_id()) {
            python_end.returning.fetch_sub(1);
            for (;;) {
                pause();
            }
        }
        PyEval_RestoreThread(state_);
        is_released_ = false;
        python_end.returning.fetch_sub(1);
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

    // Whether there is a GIL to release: this thread is one of Python's, and has not released it. The stable ABI has
    // no PyGILState_Check.
    static bool is_possible() { return PyGILState_GetThisThreadState() != nullptr && !is_released_; }

private:
    static inline thread_local bool is_released_ = false;

    PyThreadState* const state_;
};

// A broken contract is the caller's fault, so a ValueError; anything else a RuntimeError. Needs the GIL.
inline void raise_if_not_ok(const Status& status) {
    if (status.ok()) {
        return;
    }
    if (status.code() == Code::invalid) {
        throw nanobind::value_error(status.message().c_str());
    }
    nanobind::raise("%s", status.message().c_str());
}

// Anything with the buffer protocol, seen as bytes.
//
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

// Conversions to and from Python's values, for the bindings of the cache and of its readers.

template <typename Value>
Value take(Result<Value> result) {
    raise_if_not_ok(result.ok() ? Status{} : result.fault());
    return std::move(result.value());
}

template <typename Number>
nanobind::bytes to_bytes(const std::vector<Number>& numbers) {
    return nanobind::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

inline Space space_of(std::uint32_t name_space, std::uint32_t group) {
    if (name_space >= kNamespaceNumbers || group >= kGroupLimit) {
        throw nanobind::value_error("no such group");
    }
    return make_space(name_space, group);
}

}  // namespace kvo

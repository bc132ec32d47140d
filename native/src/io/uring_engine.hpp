// The I/O engine of kernels with io_uring, by raw system calls.
#pragma once

#include <memory>

#include "base/status.hpp"
#include "io/io_engine.hpp"

namespace kvo {

class UringEngine final : public IoEngine {
public:
    // Code::unavailable, with the reason in words: the kernel refuses a ring, or one that can read and write (5.6).
    static Result<std::unique_ptr<IoEngine>> create(std::size_t depth);

    // Requests still under way keep using the memory that the caller gave them.
    ~UringEngine() override;
    UringEngine(const UringEngine&) = delete;
    UringEngine& operator=(const UringEngine&) = delete;

    const char* name() const noexcept override { return "io_uring"; }
    std::size_t depth() const noexcept override;
    std::size_t submit(std::span<const IoRequest> requests) override;
    void poll(std::vector<IoEnd>& ended) override;
    int file() const noexcept override;
    bool close(int timeout_ms) override;

private:
    class Ring;
    explicit UringEngine(std::unique_ptr<Ring> ring);

    std::unique_ptr<Ring> ring_;
};

// Whether this process may use io_uring: asked of the kernel, since versions and sandboxes both decide.

// Makes the smallest ring and closes it. Code::unavailable, with the reason in words, if the kernel refuses.
Status probe_io_uring();

// Returns Code::unavailable with an explanation of this errno of io_uring_setup.
Status io_uring_refusal(int error);

// Explains an errno of io_uring_setup to the machine's operator. `disabled_level` is kernel.io_uring_disabled, or -1 if
// the kernel has no such setting.
std::string explain_io_uring_refusal(int error, int disabled_level);

}  // namespace kvo

// The I/O engine of kernels without io_uring: a few threads, each with one request at a time.
#pragma once

#include <memory>

#include "base/status.hpp"
#include "io/io_engine.hpp"

namespace kvo {

class ThreadEngine final : public IoEngine {
public:
    // As many threads as requests may be under way. Code::failed: not one thread can be had; fewer are taken as they
    // are.
    static Result<std::unique_ptr<IoEngine>> create(std::size_t depth);

    // Threads whose file does not answer are left behind, with what they hold.
    ~ThreadEngine() override;
    ThreadEngine(const ThreadEngine&) = delete;
    ThreadEngine& operator=(const ThreadEngine&) = delete;

    const char* name() const noexcept override { return "threads"; }
    std::size_t depth() const noexcept override;
    std::size_t submit(std::span<const IoRequest> requests) override;
    void poll(std::vector<IoEnd>& ended) override;
    int file() const noexcept override;
    bool close(int timeout_ms) override;

private:
    class Core;
    explicit ThreadEngine(std::shared_ptr<Core> core);

    std::shared_ptr<Core> core_;
};

}  // namespace kvo

// The I/O engine of kernels without io_uring: a few threads, each with one request at a time.
#pragma once

#include <memory>

#include "base/status.hpp"
#include "io/io_engine.hpp"

namespace kvo {

class ThreadEngine final : public IoEngine {
public:
    // Starts `depth` threads, one for each request under way, or fewer if the system gives fewer. Code::failed: no
    // thread can be started.
    static Result<std::unique_ptr<IoEngine>> create(std::size_t depth);

    // Leaves threads behind whose file does not answer, with the memory that they use.
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

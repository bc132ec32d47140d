// An I/O engine that goes wrong as a test wants it to.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "io/io_engine.hpp"

namespace kvo::test {

struct IoFault {
    enum class Kind : std::uint8_t { none, error, cut, hang };
    Kind kind = Kind::none;
    int error = 0;             // of `error`; of `hang`, how it ends when it is released, if not well
    std::uint32_t length = 0;  // of `cut`: what is moved of it
};

// Decides the fault of a request when it is submitted. The decision may be changed from any thread.
class FaultPlan {
public:
    using Decide = std::function<IoFault(const IoRequest&)>;

    void set(Decide decide) {
        const std::lock_guard hold(lock_);
        decide_ = std::move(decide);
    }
    IoFault decide(const IoRequest& request) {
        const std::lock_guard hold(lock_);
        return decide_ ? decide_(request) : IoFault{};
    }
    // Requests that hang go on at the next poll.
    void release() {
        const std::lock_guard hold(lock_);
        is_released_ = true;
    }
    bool is_released() {
        const std::lock_guard hold(lock_);
        return is_released_;
    }

private:
    std::mutex lock_;
    Decide decide_;
    bool is_released_ = false;
};

class FaultyIo final : public IoEngine {
public:
    FaultyIo(std::unique_ptr<IoEngine> inner, std::shared_ptr<FaultPlan> plan)
        : inner_(std::move(inner)), plan_(std::move(plan)) {}

    const char* name() const noexcept override { return "faulty"; }
    std::size_t depth() const noexcept override { return inner_->depth(); }
    int file() const noexcept override { return inner_->file(); }

    std::size_t submit(std::span<const IoRequest> requests) override {
        std::size_t taken = 0;
        for (IoRequest request : requests) {
            const IoFault fault = hung_.size() + made_up_.size() < depth() ? plan_->decide(request) : IoFault{};
            if (fault.kind == IoFault::Kind::error) {
                made_up_.push_back({request.token, -fault.error});
                tell();
            } else if (fault.kind == IoFault::Kind::hang) {
                hung_.push_back({request, fault.error});
            } else {
                request.length = fault.kind == IoFault::Kind::cut ? fault.length : request.length;
                if (request.length == 0 && request.kind != IoKind::sync) {
                    made_up_.push_back({request.token, 0});
                    tell();
                } else if (inner_->submit({&request, 1}) != 1) {
                    return taken;
                }
            }
            ++taken;
        }
        return taken;
    }
    void poll(std::vector<IoEnd>& ended) override {
        while (plan_->is_released() && !hung_.empty()) {
            const auto& [request, error] = hung_.front();
            if (error != 0) {
                made_up_.push_back({request.token, -error});
            } else if (inner_->submit({&request, 1}) != 1) {
                break;
            }
            hung_.erase(hung_.begin());
        }
        inner_->poll(ended);
        ended.insert(ended.end(), made_up_.begin(), made_up_.end());
        made_up_.clear();
    }
    bool close(int timeout_ms) override { return inner_->close(timeout_ms) && hung_.empty(); }

private:
    void tell() const {
        const std::uint64_t one = 1;
        static_cast<void>(!write(file(), &one, sizeof one));
    }

    const std::unique_ptr<IoEngine> inner_;
    const std::shared_ptr<FaultPlan> plan_;
    std::vector<std::pair<IoRequest, int>> hung_;
    std::vector<IoEnd> made_up_;
};

}  // namespace kvo::test

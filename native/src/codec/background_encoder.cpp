#include "codec/background_encoder.hpp"

#include <pthread.h>
#include <unistd.h>

#include <system_error>
#include <utility>

namespace kvo {
namespace {

constexpr int kNiceness = 5;  // as the disk's thread, which codes too

}  // namespace

BackgroundEncoder::~BackgroundEncoder() {
    if (thread_.joinable()) {
        {
            const std::lock_guard hold(lock_);
            state_ = State::stopping;
        }
        changed_.notify_all();
        thread_.join();
    }
}

std::span<const std::uint8_t> BackgroundEncoder::encode(std::span<const std::uint8_t> record) {
    if (!thread_.joinable()) {
        try {
            thread_ = std::thread([this] { run(); });
        } catch (const std::system_error&) {
            return encoder_.encode(record);
        }
    }
    std::unique_lock hold(lock_);
    record_ = record;
    state_ = State::wanted;
    changed_.notify_all();
    changed_.wait(hold, [this] { return state_ == State::done; });
    state_ = State::idle;
    if (fault_) {
        std::rethrow_exception(std::exchange(fault_, nullptr));
    }
    return coded_;
}

void BackgroundEncoder::run() {
    pthread_setname_np(pthread_self(), "kvoffload-code");
    static_cast<void>(!nice(kNiceness));  // a thread's own, on Linux
    std::unique_lock hold(lock_);
    for (;;) {
        changed_.wait(hold, [this] { return state_ == State::wanted || state_ == State::stopping; });
        if (state_ == State::stopping) {
            return;
        }
        hold.unlock();
        std::span<const std::uint8_t> coded;
        std::exception_ptr fault;
        try {
            coded = encoder_.encode(record_);
        } catch (...) {
            fault = std::current_exception();
        }
        hold.lock();
        coded_ = coded;
        fault_ = std::move(fault);
        state_ = State::done;
        changed_.notify_all();
    }
}

}  // namespace kvo

#include "codec/background_codec.hpp"

#include <pthread.h>
#include <unistd.h>

#include <system_error>
#include <utility>

namespace kvo {
namespace {

constexpr int kNiceness = 5;  // as the disk's thread, which codes too

}  // namespace

BackgroundCodec::~BackgroundCodec() {
    if (thread_.joinable()) {
        {
            const std::lock_guard hold(lock_);
            state_ = State::stopping;
        }
        changed_.notify_all();
        thread_.join();
    }
}

std::span<const std::uint8_t> BackgroundCodec::encode(std::span<const std::uint8_t> record) {
    std::span<const std::uint8_t> coded;
    run([&] { coded = encoder_.encode(record); });
    return coded;
}

bool BackgroundCodec::decode(std::span<const std::uint8_t> coded, std::span<std::uint8_t> record) {
    bool is_whole = false;
    run([&] { is_whole = decode_record(coded, record); });
    return is_whole;
}

void BackgroundCodec::run(const std::function<void()>& work) {
    if (!thread_.joinable()) {
        try {
            thread_ = std::thread([this] { serve(); });
        } catch (const std::system_error&) {
            work();
            return;
        }
    }
    std::unique_lock hold(lock_);
    work_ = &work;
    state_ = State::wanted;
    changed_.notify_all();
    changed_.wait(hold, [this] { return state_ == State::done; });
    state_ = State::idle;
    if (fault_) {
        std::rethrow_exception(std::exchange(fault_, nullptr));
    }
}

void BackgroundCodec::serve() {
    pthread_setname_np(pthread_self(), "kvoffload-code");
    static_cast<void>(!nice(kNiceness));  // a thread's own, on Linux
    std::unique_lock hold(lock_);
    for (;;) {
        changed_.wait(hold, [this] { return state_ == State::wanted || state_ == State::stopping; });
        if (state_ == State::stopping) {
            return;
        }
        hold.unlock();
        std::exception_ptr fault;
        try {
            (*work_)();
        } catch (...) {
            fault = std::current_exception();
        }
        hold.lock();
        fault_ = std::move(fault);
        state_ = State::done;
        changed_.notify_all();
    }
}

}  // namespace kvo

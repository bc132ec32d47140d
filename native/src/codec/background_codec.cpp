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
    if (thread_.joinable() && getpid() != process_) {
        // This is a forked child: it does not have the thread, and the handle may name another thread here. So the
        // handle is leaked.
        static_cast<void>(new std::thread(std::move(thread_)));
    } else if (thread_.joinable()) {
        state_.store(State::stopping);
        state_.notify_one();
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
            process_ = getpid();
        } catch (const std::system_error&) {
        }
    }
    if (!thread_.joinable() || getpid() != process_) {
        work();
        return;
    }
    work_ = &work;
    state_.store(State::wanted);
    state_.notify_one();
    state_.wait(State::wanted);
    if (fault_) {
        std::rethrow_exception(std::exchange(fault_, nullptr));
    }
}

void BackgroundCodec::serve() {
    pthread_setname_np(pthread_self(), "kvoffload-code");
    static_cast<void>(!nice(kNiceness));  // a thread's own, on Linux
    for (State seen = state_.load(); seen != State::stopping; seen = state_.load()) {
        if (seen != State::wanted) {
            state_.wait(seen);
            continue;
        }
        try {
            (*work_)();
        } catch (...) {
            fault_ = std::current_exception();
        }
        state_.store(State::idle);
        state_.notify_one();
    }
}

}  // namespace kvo

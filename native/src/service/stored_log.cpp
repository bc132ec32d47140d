#include "service/stored_log.hpp"

#include <sys/eventfd.h>

#include <utility>

namespace kvo {
namespace {

constexpr std::size_t kForgottenTimes = 16;  // what is not to be trusted weighs more than what is merely there

}  // namespace

StoredLog::StoredLog(std::size_t limit) : limit_(limit), ready_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {}

void StoredLog::watch(bool is_wanted) {
    is_wanted_.store(is_wanted, std::memory_order_release);
    if (!is_wanted) {
        take();
    }
}

void StoredLog::close() {
    watch(false);
    const std::lock_guard lock(mutex_);
    ready_ = FileDescriptor();
}

void StoredLog::add(StoredBlocks stored) {
    const std::size_t count = stored.hashes.size() / kHashBytes;
    const std::lock_guard lock(mutex_);
    if (count == 0 || !is_wanted()) {
        return;
    }
    if (blocks_ + count > (stored.is_forgotten ? kForgottenTimes * limit_ : limit_)) {
        kept_.lost += count;
    } else {
        blocks_ += count;
        kept_.stored.push_back(std::move(stored));
    }
    eventfd_write(ready_.number(), 1);
}

StoredLog::Taken StoredLog::take() {
    const std::lock_guard lock(mutex_);
    eventfd_t count = 0;
    eventfd_read(ready_.number(), &count);
    blocks_ = 0;
    return std::exchange(kept_, Taken());
}

}  // namespace kvo

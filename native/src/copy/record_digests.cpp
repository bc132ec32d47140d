#include "copy/record_digests.hpp"

#include <pthread.h>

#include <string>
#include <system_error>
#include <utility>

namespace kvo {
namespace {

// Number of bytes that a thread takes at once: many small records at a time, large ones each alone.
constexpr std::uint64_t kPieceBytes = std::uint64_t{256} << 10;

}  // namespace

Result<std::unique_ptr<RecordDigests>> RecordDigests::start(unsigned thread_count, HostAccess on_access) {
    std::unique_ptr<RecordDigests> digests(new RecordDigests(std::move(on_access)));
    digests->threads_.reserve(thread_count);
    try {
        while (digests->threads_.size() < thread_count) {
            digests->threads_.emplace_back([self = digests.get()] {
                pthread_setname_np(pthread_self(), "kvoffload-dig");
                self->run();
            });
        }
    } catch (const std::system_error& fault) {
        if (digests->threads_.empty()) {
            return Status(Code::failed, std::string("no thread for digests can be started: ") + fault.what());
        }
    }
    return digests;
}

RecordDigests::~RecordDigests() {
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

void RecordDigests::submit(std::shared_ptr<DigestWork> work) {
    if (work->is_done()) {
        return;  // a plan of no items
    }
    std::list<std::shared_ptr<DigestWork>> node;
    node.push_back(std::move(work));
    const std::lock_guard lock(mutex_);
    queue_.splice(queue_.end(), node);
    changed_.notify_all();
}

void RecordDigests::run() {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [this] { return is_stopping_ || !queue_.empty(); });
        if (queue_.empty()) {
            return;
        }
        const std::shared_ptr<DigestWork> work = queue_.front();
        const std::vector<CopyItem>& items = work->plan_->items;
        const std::size_t begin = work->next_;
        for (std::uint64_t bytes = 0; work->next_ < items.size() && bytes < kPieceBytes; ++work->next_) {
            bytes += work->pages_.groups[items[work->next_].group].record_bytes;
        }
        const std::size_t end = work->next_;
        if (end == items.size()) {
            queue_.pop_front();
        }
        lock.unlock();
        digest(*work, begin, end);
        lock.lock();
    }
}

void RecordDigests::digest(DigestWork& work, std::size_t begin, std::size_t end) {
    for (std::size_t i = begin; i < end && !work.is_cancelled_.load(std::memory_order_relaxed); ++i) {
        const CopyItem& item = work.plan_->items[i];
        const std::uint64_t record_bytes = work.pages_.groups[item.group].record_bytes;
        const auto* const slot = reinterpret_cast<const std::uint8_t*>(item.slot);
        if (on_access_) {
            on_access_(slot, record_bytes, false);
        }
        work.digests_[i] = digest_run({slot, record_bytes}, 0);
    }
    work.left_.fetch_sub(end - begin, std::memory_order_acq_rel);
}

}  // namespace kvo

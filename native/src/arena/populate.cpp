#include "arena/populate.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "shim/memory_headroom.hpp"
#include "shim/page_backing.hpp"

namespace kvo {
namespace {

constexpr int kNiceness = 10;

// The work of one call. Each thread takes the next slice until none is left, the call is cancelled, or a slice fails.
class Filling {
public:
    Filling(Segment& segment, const PopulateTerms& terms, SegmentRange range, std::uint64_t slice_bytes,
            PopulateProgress& progress)
        : segment_(segment),
          terms_{terms.keep_free_bytes, std::max(terms.threads, 1U), terms.proc},
          end_(range.offset + range.length),
          slice_bytes_(slice_bytes),
          progress_(progress),
          next_(range.offset) {}

    void fill() {
        while (!progress_.is_cancelled.load(std::memory_order_relaxed) && !has_failed_.load()) {
            const std::uint64_t offset = next_.fetch_add(slice_bytes_, std::memory_order_relaxed);
            if (offset >= end_) {
                return;
            }
            const std::uint64_t length = std::min(slice_bytes_, end_ - offset);
            if (Status given = segment_.commit_range(offset, length, terms_); !given.ok()) {
                keep_fault(std::move(given));
                return;
            }
            progress_.done_bytes.fetch_add(length, std::memory_order_relaxed);
        }
    }

    // After the threads have ended.
    const Status& fault() const { return fault_; }

private:
    void keep_fault(Status fault) {
        const std::lock_guard hold(lock_);
        if (fault_.ok()) {
            fault_ = std::move(fault);
        }
        has_failed_ = true;
    }

    Segment& segment_;
    const CommitTerms terms_;
    const std::uint64_t end_;
    const std::uint64_t slice_bytes_;
    PopulateProgress& progress_;
    std::atomic<std::uint64_t> next_;
    std::atomic<bool> has_failed_ = false;
    std::mutex lock_;
    Status fault_;
};

// A thread that has lowered itself may not rise again, so the caller works itself only where it stays as it is.
void fill_by_threads(Filling& filling, unsigned threads, bool is_background) {
    std::vector<std::jthread> others;
    others.reserve(threads);
    try {
        for (unsigned number = is_background ? 0 : 1; number < threads; ++number) {
            others.emplace_back([&filling, is_background] {
                if (is_background) {
                    static_cast<void>(setpriority(PRIO_PROCESS, 0, kNiceness));  // a thread's own, on Linux
                }
                filling.fill();
            });
        }
    } catch (const std::system_error&) {
        // No more threads: those there are do the work.
    }
    if (!is_background || others.empty()) {
        filling.fill();
    }
}

}  // namespace

Result<bool> populate(Segment& segment, const PopulateTerms& terms, PopulateProgress& progress, SegmentRange range) {
    range.offset = std::min(range.offset, segment.size_bytes());
    range.length = std::min(range.length, segment.size_bytes() - range.offset);
    const std::uint64_t before = progress.done_bytes;
    const std::uint64_t missing =
        std::min(range.length, segment.size_bytes() - std::min(segment.size_bytes(), segment.held_bytes()));
    if (missing > 0 && !segment.is_hugetlb()) {
        if (Status room = check_memory_headroom(missing + terms.keep_free_bytes, terms.proc); !room.ok()) {
            return room;
        }
    }
    // Whole huge pages, so that no two threads meet in one.
    const std::uint64_t unit = std::max<std::uint64_t>(segment.page_bytes(), kHugePageBytes);
    const std::uint64_t slice_bytes = std::max<std::uint64_t>(terms.slice_bytes / unit, 1) * unit;
    const std::uint64_t slices = std::max<std::uint64_t>((range.length + slice_bytes - 1) / slice_bytes, 1);
    const auto threads = static_cast<unsigned>(std::clamp<std::uint64_t>(terms.threads, 1, slices));

    Filling filling(segment, terms, range, slice_bytes, progress);
    fill_by_threads(filling, threads, terms.is_background);
    if (!filling.fault().ok()) {
        return filling.fault();
    }
    return progress.done_bytes - before == range.length;
}

}  // namespace kvo

#include "arena/populate.hpp"

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

// One call's work. Each thread takes the next slice until none is left or somebody stops.
class Filling {
public:
    Filling(Segment& segment, const PopulateTerms& terms, std::uint64_t slice_bytes, PopulateProgress& progress)
        : segment_(segment),
          terms_{terms.keep_free_bytes, std::max(terms.threads, 1U), terms.proc},
          slice_bytes_(slice_bytes),
          progress_(progress) {}

    void fill() {
        while (!progress_.is_cancelled.load(std::memory_order_relaxed) && !has_failed_.load()) {
            const std::uint64_t offset = next_.fetch_add(slice_bytes_, std::memory_order_relaxed);
            if (offset >= segment_.size_bytes()) {
                return;
            }
            const std::uint64_t length = std::min(slice_bytes_, segment_.size_bytes() - offset);
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
    const std::uint64_t slice_bytes_;
    PopulateProgress& progress_;
    std::atomic<std::uint64_t> next_ = 0;
    std::atomic<bool> has_failed_ = false;
    std::mutex lock_;
    Status fault_;
};

void fill_by_threads(Filling& filling, unsigned threads) {
    std::vector<std::jthread> others;
    others.reserve(threads);
    try {
        for (unsigned number = 1; number < threads; ++number) {
            others.emplace_back([&filling] { filling.fill(); });
        }
    } catch (const std::system_error&) {
        // No more threads: those there are do the work.
    }
    filling.fill();
}

}  // namespace

Result<Populated> populate(Segment& segment, const PopulateTerms& terms, PopulateProgress& progress) {
    const std::uint64_t before = progress.done_bytes;
    const std::uint64_t missing = segment.size_bytes() - std::min(segment.size_bytes(), segment.held_bytes());
    if (missing > 0 && !segment.is_hugetlb()) {
        if (Status room = check_memory_headroom(missing + terms.keep_free_bytes, terms.proc); !room.ok()) {
            return room;
        }
    }
    // Whole huge pages, so that no two threads meet in one.
    const std::uint64_t unit = std::max<std::uint64_t>(segment.page_bytes(), kHugePageBytes);
    const std::uint64_t slice_bytes = std::max<std::uint64_t>(terms.slice_bytes / unit, 1) * unit;
    const std::uint64_t slices = (segment.size_bytes() + slice_bytes - 1) / slice_bytes;
    const auto threads = static_cast<unsigned>(std::clamp<std::uint64_t>(terms.threads, 1, slices));

    Filling filling(segment, terms, slice_bytes, progress);
    fill_by_threads(filling, threads);
    if (!filling.fault().ok()) {
        return filling.fault();
    }
    return Populated{progress.done_bytes - before == segment.size_bytes(), segment.huge_bytes()};
}

}  // namespace kvo

#include "copy/host_copy.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <span>

#include "shim/cpu_features.hpp"

namespace kvo {
namespace {

void stream_lines_portable(std::uint8_t* to, const std::uint8_t* from, std::size_t line_count) noexcept {
    std::memcpy(to, from, line_count * kStreamLineBytes);
}

constexpr StreamPath kPortable = {stream_lines_portable, "portable"};

}  // namespace

std::span<const StreamPath> stream_paths() noexcept {
#if defined(__x86_64__)
    static constexpr std::array kPaths = {StreamPath{stream_lines_avx512, "avx512"},
                                          StreamPath{stream_lines_avx2, "avx2"}, kPortable};
    const std::size_t missing = cpu_features().has(CpuFeature::avx512f) ? 0
                                : cpu_features().has(CpuFeature::avx2)  ? 1
                                                                        : 2;
#else
    static constexpr std::array kPaths = {kPortable};
    const std::size_t missing = 0;
#endif
    return std::span(kPaths).subspan(missing);
}

void stream_fence() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#else
    std::atomic_thread_fence(std::memory_order_release);
#endif
}

void stream_copy(std::uint8_t* to, std::span<const std::uint8_t> from, const StreamPath& path) noexcept {
    const std::size_t skewed = reinterpret_cast<std::uintptr_t>(to) % kStreamLineBytes;
    const std::size_t head = std::min((kStreamLineBytes - skewed) % kStreamLineBytes, from.size());
    const std::size_t lines = (from.size() - head) / kStreamLineBytes;
    const std::size_t tail_at = head + lines * kStreamLineBytes;
    std::copy_n(from.data(), head, to);
    if (lines > 0) {
        path.stream_lines(to + head, from.data() + head, lines);
    }
    std::copy_n(from.data() + tail_at, from.size() - tail_at, to + tail_at);
}

// One chunk is in the nearest cache when it is read for the second time.
RunDigest stream_with_digest(std::uint8_t* to, std::span<const std::uint8_t> from, std::uint64_t offset,
                             const StreamPath& path) noexcept {
    RunDigest total;
    while (!from.empty()) {
        const std::size_t length = std::min<std::size_t>(kDigestChunkBytes - offset % kDigestChunkBytes, from.size());
        const auto chunk = from.first(length);
        total = combine(total, digest_run(chunk, offset));
        stream_copy(to, chunk, path);
        from = from.subspan(length);
        offset += length;
        to += length;
    }
    return total;
}

namespace {

// A plan larger than what one core's caches hold goes around them; what it copied is not there when it is wanted.
constexpr std::uint64_t kStreamPlanBytes = std::uint64_t{2} << 20;
constexpr std::uint64_t kStreamRunBytes = 1024;

// The processor follows a run by itself, but not from one run into the next. So the beginning of the next run is asked
// for, and one line of a later one, which finds that page's place in memory.
constexpr std::size_t kLinesAhead = 16;
constexpr std::size_t kRunsAhead = 4;
constexpr std::size_t kRunsAtOnce = 64;

const std::uint8_t* pointer(std::uint64_t address) noexcept { return reinterpret_cast<const std::uint8_t*>(address); }

class PieceCopy {
public:
    PieceCopy(const CopyPlan& plan, bool streams, const TakeDigest& take_digest)
        : plan_(plan), streams_(streams), take_digest_(take_digest) {}

    void add(const CopyRun& run) {
        runs_[count_++] = run;
        if (count_ == runs_.size()) {
            copy_first(count_ - kRunsAhead);
            std::copy(runs_.end() - kRunsAhead, runs_.end(), runs_.begin());
            count_ = kRunsAhead;
        }
    }

    void end() {
        copy_first(count_);
        end_record();
        if (streams_) {
            stream_fence();
        }
    }

private:
    std::uint64_t source_of(const CopyRun& run) const noexcept {
        return plan_.direction == CopyDirection::save ? run.page : run.slot;
    }
    std::uint64_t target_of(const CopyRun& run) const noexcept {
        return plan_.direction == CopyDirection::save ? run.slot : run.page;
    }

    void copy_first(std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            if (i + kRunsAhead < count_) {
                __builtin_prefetch(pointer(source_of(runs_[i + kRunsAhead])));
            }
            if (i + 1 < count_) {
                expect(runs_[i + 1]);
            }
            copy(runs_[i]);
        }
    }

    void expect(const CopyRun& run) const noexcept {
        const std::uint64_t source = source_of(run);
        const std::uint64_t length = std::min<std::uint64_t>(run.length, kLinesAhead * kStreamLineBytes);
        for (std::uint64_t at = 0; at < length; at += kStreamLineBytes) {
            __builtin_prefetch(pointer(source + at));
        }
    }

    void copy(const CopyRun& run) {
        const std::span<const std::uint8_t> from(pointer(source_of(run)), run.length);
        auto* const to = const_cast<std::uint8_t*>(pointer(target_of(run)));
        const bool streams = streams_ && run.length >= kStreamRunBytes;
        if (!plan_.has_digests) {
            streams ? stream_copy(to, from) : static_cast<void>(std::memcpy(to, from.data(), from.size()));
            return;
        }
        if (run.item != item_) {
            end_record();
            item_ = run.item;
        }
        has_record_ = true;
        record_ = combine(record_, streams ? stream_with_digest(to, from, run.record_offset)
                                           : copy_with_digest(to, from, run.record_offset));
    }

    void end_record() {
        if (has_record_) {
            take_digest_(item_, record_);
        }
        has_record_ = false;
        record_ = {};
    }

    const CopyPlan& plan_;
    const bool streams_;
    const TakeDigest& take_digest_;
    std::array<CopyRun, kRunsAtOnce> runs_;
    std::size_t count_ = 0;
    std::uint32_t item_ = 0;
    RunDigest record_;
    bool has_record_ = false;
};

}  // namespace

void copy_piece(const CopyPlan& plan, const RunList& runs, std::uint64_t begin, std::uint64_t end,
                const TakeDigest& take_digest) {
    PieceCopy piece(plan, runs.total_bytes() >= kStreamPlanBytes, take_digest);
    runs.visit_runs(begin, end, [&](const CopyRun& run) { piece.add(run); });
    piece.end();
}

}  // namespace kvo

// The copy kernel's body: gathers pages into a contiguous staging buffer, or scatters it back.
//
// Both are the same act, a list of runs from anywhere to anywhere, so there is one body. It is compiled for the device
// by copy_runs.cu and for the host by code that emulates threads: tests, and the driver made for tests.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define KVO_HOST_DEVICE __host__ __device__
#else
#define KVO_HOST_DEVICE
#endif

namespace kvo {

// Run i is lengths[i] bytes from sources[i] to destinations[i]. No destination overlaps another run's bytes. Addresses
// are numbers because they are of memory that the one who writes this list may not be able to read.
struct CopyRuns {
    const std::uint64_t* sources;
    const std::uint64_t* destinations;
    const std::uint64_t* lengths;
    std::uint64_t count;
};

// `thread` of `threads` that run the body. `team_size` neighbours share one run: 32 suits pages of a few hundred bytes,
// a whole thread block suits pages of 4 KiB and more. It divides `threads`.
struct CopyThread {
    std::uint64_t thread;
    std::uint64_t threads;
    std::uint32_t team_size;
};

namespace copy_detail {

// The bytes that one thread moves at once, by the widest load and store there is. Aliases anything, as char does.
struct alignas(16) Bytes16 {
    std::uint64_t low;
    std::uint64_t high;
} __attribute__((may_alias));
using Bytes4 = std::uint32_t __attribute__((may_alias));

// Loads are issued in groups before the stores that depend on them: one thread keeps this many in flight.
inline constexpr std::uint32_t kInFlight = 4;

KVO_HOST_DEVICE inline std::uint64_t smaller(std::uint64_t a, std::uint64_t b) { return a < b ? a : b; }

// Copies `count` words, this thread every `lanes`-th of them.
template <typename Word>
KVO_HOST_DEVICE inline void copy_words(const Word* source, Word* destination, std::uint64_t count, std::uint32_t lane,
                                       std::uint32_t lanes) {
    std::uint64_t at = lane;
    for (; at + (kInFlight - 1) * std::uint64_t{lanes} < count; at += kInFlight * std::uint64_t{lanes}) {
        Word words[kInFlight];
        for (std::uint32_t i = 0; i < kInFlight; ++i) {
            words[i] = source[at + i * std::uint64_t{lanes}];
        }
        for (std::uint32_t i = 0; i < kInFlight; ++i) {
            destination[at + i * std::uint64_t{lanes}] = words[i];
        }
    }
    for (; at < count; at += lanes) {
        destination[at] = source[at];
    }
}

// Bytes up to the first word of the destination, whole words, bytes that are left. Both ends are equally far from a
// multiple of the word's size: the caller has looked.
template <typename Word>
KVO_HOST_DEVICE inline void copy_aligned(std::uint64_t source, std::uint64_t destination, std::uint64_t length,
                                         std::uint32_t lane, std::uint32_t lanes) {
    const std::uint64_t head = smaller((0 - destination) % sizeof(Word), length);
    const std::uint64_t words = (length - head) / sizeof(Word);
    const std::uint64_t tail_at = head + words * sizeof(Word);
    const auto* from = reinterpret_cast<const unsigned char*>(source);
    auto* to = reinterpret_cast<unsigned char*>(destination);
    copy_words(from, to, head, lane, lanes);
    copy_words(reinterpret_cast<const Word*>(source + head), reinterpret_cast<Word*>(destination + head), words, lane,
               lanes);
    copy_words(from + tail_at, to + tail_at, length - tail_at, lane, lanes);
}

}  // namespace copy_detail

// One thread's share of one run: a list of runs is fetched from mapped host memory by it. A DMA would wait behind the
// pages that go to the device. Source and destination are equally far from a multiple of 16.
KVO_HOST_DEVICE inline void fetch(std::uint64_t source, std::uint64_t destination, std::uint64_t length,
                                  std::uint32_t thread, std::uint32_t threads) {
    copy_detail::copy_aligned<copy_detail::Bytes16>(source, destination, length, thread, threads);
}

// One thread's share of all runs. Any number of threads does the whole work; none waits for another.
KVO_HOST_DEVICE inline void copy_runs(const CopyRuns& runs, const CopyThread& self) {
    const auto lane = static_cast<std::uint32_t>(self.thread % self.team_size);
    const std::uint64_t teams = self.threads / self.team_size;
    for (std::uint64_t run = self.thread / self.team_size; run < runs.count; run += teams) {
        const std::uint64_t source = runs.sources[run];
        const std::uint64_t destination = runs.destinations[run];
        const std::uint64_t length = runs.lengths[run];
        const std::uint64_t skew = source ^ destination;
        if (skew % sizeof(copy_detail::Bytes16) == 0) {
            copy_detail::copy_aligned<copy_detail::Bytes16>(source, destination, length, lane, self.team_size);
        } else if (skew % sizeof(copy_detail::Bytes4) == 0) {
            copy_detail::copy_aligned<copy_detail::Bytes4>(source, destination, length, lane, self.team_size);
        } else {
            copy_detail::copy_aligned<unsigned char>(source, destination, length, lane, self.team_size);
        }
    }
}

}  // namespace kvo

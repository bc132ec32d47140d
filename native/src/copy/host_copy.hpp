// The host engine's inner copy: by stores that go around the caches where those would only be in the way.
//
// An ordinary store reads the line that it will overwrite, and drives out another one. For bytes that are not read soon
// that is half again as much traffic as need be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "copy/copy_plan.hpp"
#include "copy/run_list.hpp"
#include "digest/digest.hpp"

namespace kvo {

// The implementations of streamed lines. For host_copy*.cpp only.

#if defined(__x86_64__)
void stream_lines_avx512(std::uint8_t* to, const std::uint8_t* from, std::size_t line_count) noexcept;
void stream_lines_avx2(std::uint8_t* to, const std::uint8_t* from, std::size_t line_count) noexcept;
#endif

inline constexpr std::size_t kStreamLineBytes = 64;

// Copies whole lines to an address that is a multiple of their size; the source needs no alignment. Others see what was
// written after stream_fence().
using StreamLines = void (*)(std::uint8_t* to, const std::uint8_t* from, std::size_t line_count) noexcept;

struct StreamPath {
    StreamLines stream_lines;
    const char* name;  // "avx512", "avx2" or "portable", which is memcpy
};

// Every path this machine can run, the fastest first, the portable one last. Safe to call from any thread.
std::span<const StreamPath> stream_paths() noexcept;

inline const StreamPath& stream_path() noexcept { return stream_paths().front(); }

// The thread that wrote streamed bytes calls this before it tells other threads that they are there.
void stream_fence() noexcept;

// Any lengths and addresses; the two do not overlap.
void stream_copy(std::uint8_t* to, std::span<const std::uint8_t> from, const StreamPath& path = stream_path()) noexcept;

// The same, with the digest of the run, which begins at `offset` of its record.
RunDigest stream_with_digest(std::uint8_t* to, std::span<const std::uint8_t> from, std::uint64_t offset,
                             const StreamPath& path = stream_path()) noexcept;

// A thread's piece of a plan: its runs, one after the other, with the next ones asked for in time.

// Called with an item of the plan and the digest of what this piece has of its record, once for each such record.
using TakeDigest = std::function<void(std::uint32_t item, const RunDigest& digest)>;

// Copies the bytes [begin, end) of the row; others see them when this returns. Throws only what `take_digest` throws,
// which is not called for plans without digests.
void copy_piece(const CopyPlan& plan, const RunList& runs, std::uint64_t begin, std::uint64_t end,
                const TakeDigest& take_digest);

}  // namespace kvo

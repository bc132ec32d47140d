// The host engine's inner copy: by stores that go around the caches where those would only be in the way.
//
// An ordinary store reads the line that it will overwrite, and drives out another one. For bytes that are not read soon
// that is half again as much traffic as need be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "digest/digest.hpp"

namespace kvo {

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

}  // namespace kvo

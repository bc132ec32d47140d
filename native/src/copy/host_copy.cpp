#include "copy/host_copy.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>

#include "copy/host_copy_paths.hpp"
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

}  // namespace kvo

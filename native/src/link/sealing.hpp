// AES-256-GCM by a libcrypto.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/status.hpp"
#include "link/libcrypto.hpp"

namespace kvo {

inline constexpr std::size_t kSealKeyBytes = 32;
inline constexpr std::size_t kSealTagBytes = 16;

using SealKey = std::array<std::uint8_t, kSealKeyBytes>;
using SealTag = std::array<std::uint8_t, kSealTagBytes>;

// One direction of one connection. Pieces are sealed, or opened, one after the other, each under the next number: a
// piece that was changed, left out, repeated or moved does not open. For one thread at a time.
class Sealing {
public:
    enum class Way { seal, open };

    // The library outlives it. A key must never be used for a second Sealing of the same way. Code::failed: the library
    // does not take it.
    static Result<Sealing> make(const Libcrypto& library, const SealKey& key, Way way);

    Sealing(Sealing&&) noexcept;
    Sealing& operator=(Sealing&&) noexcept;
    ~Sealing();

    // Begins the next piece.
    Status begin();
    // Seals or opens some of the piece's bytes; a piece may come in any number of parts. `out` has as many bytes, and
    // may be the same memory. Opened bytes must not be trusted before `check` succeeds.
    Status run(std::span<const std::uint8_t> in, std::uint8_t* out);
    // Ends a piece that was sealed, and returns its tag.
    Result<SealTag> finish();
    // Ends a piece that was opened, and checks its tag. Code::failed: the piece is not the one that was sealed.
    Status check(const SealTag& tag);

private:
    Sealing(const CryptoCalls* calls, void* state, Way way) noexcept : calls_(calls), state_(state), way_(way) {}

    const CryptoCalls* calls_;
    void* state_;
    Way way_;
    std::uint64_t next_ = 0;
};

}  // namespace kvo

// AES-256-GCM by a libcrypto.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "base/status.hpp"

namespace kvo {

// A libcrypto and what of it is called, found at run time: its owner keeps it up to date, we don't.

// The functions of libcrypto that we call, as it has declared them since version 1.1; its types are opaque there, too.
struct CryptoCalls {
    void* (*new_state)() = nullptr;
    void (*free_state)(void*) = nullptr;
    const void* (*aes_256_gcm)() = nullptr;
    int (*init)(void*, const void* cipher, void* engine, const unsigned char* key, const unsigned char* nonce,
                int seals) = nullptr;
    int (*update)(void*, unsigned char* out, int* out_bytes, const unsigned char* in, int in_bytes) = nullptr;
    int (*finish)(void*, unsigned char* out, int* out_bytes) = nullptr;
    int (*control)(void*, int type, int number, void* pointer) = nullptr;
};

struct Libcrypto {
    CryptoCalls calls;
    unsigned long version = 0;  // a newer one has a larger number
    std::string name;           // with its version, in its own words
    std::string file;
};

// Opens the library of this name, as the loader finds it, or of this file. Code::unavailable: there is none, or it
// cannot seal.
Result<Libcrypto> open_libcrypto(const std::string& name);

// Returns the machine's library, which seals all links; it lives as long as the process. Any thread may call it.
// Code::unavailable: the machine has none.
Result<const Libcrypto*> machine_libcrypto();

inline constexpr std::size_t kSealKeyBytes = 32;
inline constexpr std::size_t kSealTagBytes = 16;

using SealKey = std::array<std::uint8_t, kSealKeyBytes>;
using SealTag = std::array<std::uint8_t, kSealTagBytes>;

// One direction of one connection, or one record. Pieces are sealed, or opened, one after the other, each under the
// next number: a piece that was changed, left out, repeated or moved does not open. For one thread at a time.
class Sealing {
public:
    enum class Way { seal, open };

    // The library outlives it. A key must never be used for a second Sealing that seals, nor on a link for a second one
    // that opens. Code::failed: the library does not take it.
    static Result<Sealing> make(const Libcrypto& library, const SealKey& key, Way way);

    Sealing(Sealing&&) noexcept;
    Sealing& operator=(Sealing&&) noexcept;
    ~Sealing();

    // Begins the next piece.
    Status begin();
    // Binds the piece to bytes that are not part of it: it only opens with the same ones. Call it before `run`.
    Status bind(std::span<const std::uint8_t> bytes);
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

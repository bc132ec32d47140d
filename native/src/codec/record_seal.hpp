// Records outside the server's memory where it has a key file: sealed with AES-256-GCM as docs/format.md says, each
// under a key of its own, with its name as associated data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "digest/digest.hpp"
#include "link/sealing.hpp"

namespace kvo {

// A sealed record is a head (a salt, and sealed: the digest and the form), the record's bytes or its coded ones, and
// the tag.
inline constexpr std::size_t kSaltBytes = 16;
inline constexpr std::size_t kSealedHeadBytes = kSaltBytes + 16;
inline constexpr std::uint64_t kSealOverheadBytes = kSealedHeadBytes + kSealTagBytes;

// The fields that a record is bound to: under other ones it does not open.
struct SealedName {
    RecordName name;
    std::span<const std::uint8_t, kBlockHashBytes> parent;
    std::uint64_t record_bytes;
};

// The form of the bytes within the seal.
enum class SealedForm : std::uint64_t { plain, coded };

// A sealed record in its parts.
struct SealedParts {
    std::span<const std::uint8_t, kSealedHeadBytes> head;
    std::span<const std::uint8_t> payload;
    std::span<const std::uint8_t, kSealTagBytes> tag;
};

// Takes a sealed record apart. None: it is too short to be one.
std::optional<SealedParts> split_sealed(std::span<const std::uint8_t> sealed) noexcept;

// The keys of a key file. Any thread may call its functions.
class SealKeys {
public:
    // The first key seals, all of them open. Code::invalid: there is none. Code::unavailable: this machine has no
    // libcrypto.
    static Result<SealKeys> make(std::span<const SealKey> keys);

    // The number by which a record's header names the key that seals. It is derived from the key.
    std::uint64_t sealing() const noexcept { return keys_.front().number; }
    bool has(std::uint64_t number) const noexcept { return find(number) != nullptr; }

    // Seals `payload` into `sealed`, which has kSealOverheadBytes more. Code::failed: libcrypto or the kernel's random
    // numbers failed; what `sealed` has must not be kept.
    Status seal(const SealedName& name, std::uint64_t digest, SealedForm form, std::span<const std::uint8_t> payload,
                std::span<std::uint8_t> sealed) const;

    // Opens a record that was sealed with the key of this number, and decodes it if it is coded. `record` has
    // `name.record_bytes`, and may be the memory of the payload. `scratch`: memory for a coded one. Returns the
    // record's digest, which its bytes have. None: it is not what was sealed under this name, or the key is missing;
    // the contents of `record` are then meaningless.
    std::optional<std::uint64_t> open(std::uint64_t number, const SealedName& name, const SealedParts& sealed,
                                      std::span<std::uint8_t> record, std::vector<std::uint8_t>& scratch) const;

private:
    struct Key {
        std::uint64_t number = 0;
        SealKey key{};
    };

    SealKeys(const Libcrypto& library, std::vector<Key> keys) : library_(&library), keys_(std::move(keys)) {}
    const Key* find(std::uint64_t number) const noexcept;

    const Libcrypto* library_;
    std::vector<Key> keys_;
};

}  // namespace kvo

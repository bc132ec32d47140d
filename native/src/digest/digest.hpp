// The digest of a record: 64 bits that every tier computes alike, specified with test vectors in docs/format.md.
//
// It finds damage and mistaken records, but not forgeries: a writer that can choose bytes can make two records with one
// digest. A change of up to 8 bytes within one word, two swapped words, and another group, shard or length always
// change the sum that the digest is made from; anything else is missed with a probability of about 2^-64.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "digest/digest_field.hpp"

namespace kvo {

inline constexpr std::uint64_t kDigestVersion = 1;
inline constexpr std::size_t kDigestBlockBytes = 64;
inline constexpr std::size_t kFingerprintBytes = 32;
inline constexpr std::size_t kBlockHashBytes = 32;

// No record ends behind this offset. From here on the digest covers the record's name.
inline constexpr std::uint64_t kMaxRecordBytes = std::uint64_t{1} << 63;

// No record has this digest.
inline constexpr std::uint64_t kNoDigest = 0;

// The name of a record. It is part of the digest, so a record's bytes under another name do not pass.
struct RecordName {
    std::span<const std::uint8_t, kFingerprintBytes> fingerprint;  // of the identity
    std::span<const std::uint8_t, kBlockHashBytes> block_hash;
    std::uint32_t group;
    std::uint32_t shard;
};

// Congruent to a sum of words times keys; fewer than 80 bits.
using WordSum = digest_field::Signed;

// Sums `block_count` blocks of 64 bytes of one chunk, the first of which begins `first_word` words into the chunk, and
// copies them to `copy` unless that is null. No pointer needs an alignment.
using SumBlocks = WordSum (*)(const std::uint8_t* source, std::uint8_t* copy, std::size_t first_word,
                              std::size_t block_count) noexcept;

struct DigestPath {
    SumBlocks sum_blocks;
    const char* name;  // "avx512", "avx2" or "portable"
};

// Every path this machine can run, the fastest first, the portable one last. Safe to call from any thread.
std::span<const DigestPath> digest_paths() noexcept;

// The path that this machine uses: the first, which is the fastest.
inline const DigestPath& digest_path() noexcept { return digest_paths().front(); }

// Returns the part of a record's digest that comes from these bytes, which begin at `offset` of the record. Runs may
// have any length, offset and address, and come in any order and from any thread; whole words at aligned addresses are
// fastest. The caller promises that offset + length does not pass kMaxRecordBytes.
RunDigest digest_run(std::span<const std::uint8_t> bytes, std::uint64_t offset,
                     const DigestPath& path = digest_path()) noexcept;

// The same, while the bytes are copied to `copy`, which must not overlap them.
RunDigest copy_with_digest(std::uint8_t* copy, std::span<const std::uint8_t> bytes, std::uint64_t offset,
                           const DigestPath& path = digest_path()) noexcept;

// Combines the digests of two runs that share no byte. Associative and commutative; RunDigest{} belongs to the empty
// run.
inline RunDigest combine(const RunDigest& a, const RunDigest& b) noexcept { return digest_field::add(a, b); }

// The digest of a record of `record_bytes`, whose runs, each byte in one of them, combine to `total`. Never kNoDigest.
std::uint64_t finish(const RunDigest& total, const RecordName& name, std::uint64_t record_bytes) noexcept;

// Returns the digest of a record that lies in one piece.
std::uint64_t digest_record(std::span<const std::uint8_t> record, const RecordName& name,
                            const DigestPath& path = digest_path()) noexcept;

// The limit that the digest is measured against: nothing but reading.

// Reads all bytes once, in order, with this machine's widest loads. Returns all words combined by or (a last partial
// one with zeros), so that the compiler cannot leave a load out.
std::uint64_t read_bytes(std::span<const std::uint8_t> bytes) noexcept;

}  // namespace kvo

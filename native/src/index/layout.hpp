// The bytes of an index file: what lies where, and what each word means. One process writes it, others map it
// read-only, and after a crash another process takes it over. No addresses in it: entries name each other by number.
//
//     header | tenants | buckets | entries | digests | namespaces | sessions | lease nodes
//
// The file has its full size from the start and gets its pages step by step (see index_file.hpp). Every field that a
// reader of another process looks at is an atomic.
//
// An entry's life is in its word: generation, state, flags and lease count, changed by compare-and-swap alone.
//
//     free ──► reserved ──► readable ──► free
//                              │  └────► quarantined ──► free     (not to be found any more, still leased)
//                              └─ moving: for the instant in which its slot changes
//
// The generation grows whenever another field of the entry is about to change: who reads the same word before and
// after has read one entry whole.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "base/entry_number.hpp"

namespace kvo {

constexpr std::uint64_t kIndexMagic = 0x3158444e494f564b;  // "KVOINDX1"
constexpr std::uint32_t kIndexVersion = 6;
constexpr std::size_t kHashBytes = 32;
constexpr EntryNumber kEntryLimitMax = 1u << 30;

using HashWords = std::array<std::uint64_t, 4>;  // 32 bytes as they lie in memory

enum class EntryState : std::uint8_t { free, reserved, readable, moving, quarantined };

// Generation 32 bits, state 4, unverified 1, leases 27.
class EntryWord {
public:
    static constexpr std::uint64_t kLeaseMask = (1ull << 27) - 1;
    static constexpr std::uint64_t kUnverified = 1ull << 27;

    constexpr EntryWord() = default;
    constexpr explicit EntryWord(std::uint64_t bits) : bits_(bits) {}
    static constexpr EntryWord make(std::uint32_t generation, EntryState state) {
        return EntryWord((static_cast<std::uint64_t>(generation) << 32) | (static_cast<std::uint64_t>(state) << 28));
    }

    constexpr std::uint64_t bits() const { return bits_; }
    constexpr std::uint32_t generation() const { return static_cast<std::uint32_t>(bits_ >> 32); }
    constexpr EntryState state() const { return static_cast<EntryState>((bits_ >> 28) & 15); }
    constexpr bool is_readable() const { return state() == EntryState::readable; }
    constexpr bool is_unverified() const { return (bits_ & kUnverified) != 0; }
    constexpr std::uint32_t leases() const { return static_cast<std::uint32_t>(bits_ & kLeaseMask); }

    constexpr EntryWord next(EntryState state) const { return make(generation() + 1, state); }
    constexpr EntryWord with_state(EntryState state) const {
        return EntryWord((bits_ & ~(15ull << 28)) | (static_cast<std::uint64_t>(state) << 28));
    }
    constexpr EntryWord with_leases(std::uint32_t leases) const { return EntryWord((bits_ & ~kLeaseMask) | leases); }
    constexpr EntryWord with_unverified(bool is_unverified) const {
        return EntryWord(is_unverified ? bits_ | kUnverified : bits_ & ~kUnverified);
    }
    constexpr bool operator==(const EntryWord&) const = default;

private:
    std::uint64_t bits_ = 0;
};

constexpr std::uint32_t kGroupLimit = 64;
constexpr std::uint32_t kNamespaceLimit = 4096;

// Number of a namespace: its place in the lower 12 bits, and above them how many identities had the place before. So a
// number that was given back is not used again until 16,384 other identities have had its place.
constexpr std::uint32_t kNamespaceNumbers = 1u << 26;
constexpr std::uint32_t place_of_namespace(std::uint32_t number) { return number % kNamespaceLimit; }
constexpr std::uint32_t next_namespace(std::uint32_t number) { return (number + kNamespaceLimit) % kNamespaceNumbers; }

// Number of a namespace in the upper 26 bits, group in the lower 6: with the hash, the key.
using Space = std::uint32_t;
constexpr Space make_space(std::uint32_t name_space, std::uint32_t group) { return (name_space * kGroupLimit) | group; }
constexpr std::uint32_t namespace_of(Space space) { return space / kGroupLimit; }
constexpr std::uint32_t group_of(Space space) { return space % kGroupLimit; }
static_assert(namespace_of(make_space(kNamespaceNumbers - 1, kGroupLimit - 1)) == kNamespaceNumbers - 1);

// The facts about an entry that a look-up needs, in one cache line.
struct alignas(64) Entry {
    std::atomic<std::uint64_t> word;
    std::array<std::atomic<std::uint64_t>, 4> hash;
    std::atomic<std::uint64_t> slot;     // packed arena slot
    std::atomic<std::uint32_t> space;    // while free: number of the next free entry
    std::atomic<std::uint32_t> recency;  // the core's clock at its last acquire; while reserved: a `Reservation`
    std::atomic<std::uint32_t> parent;   // a hint for eviction; may name an entry that is another one by now
    std::atomic<std::uint16_t> tiers;    // bit 0: in memory; bit 1: acquired since it is; the rest: `parent_tag`
    std::atomic<std::uint16_t> tenant;
};
static_assert(sizeof(Entry) == 64);

inline HashWords hash_of(const Entry& entry) {
    HashWords hash{};
    for (std::size_t i = 0; i < hash.size(); ++i) {
        hash[i] = entry.hash[i].load(std::memory_order_acquire);
    }
    return hash;
}

constexpr std::uint16_t kInMemory = 1;
constexpr std::uint16_t kWasUsed = 2;

// Tag of an entry's parent, in the upper 14 bits: 0 if it is not known, all ones if there is no parent. If another
// entry has the parent's number by now, its tag differs, except in one of 16,382 cases.
constexpr std::uint16_t kParentTag = 0xfffc;
constexpr std::uint16_t kNoParentTag = kParentTag;
constexpr std::uint16_t parent_tag(std::uint64_t hash_word) {
    return static_cast<std::uint16_t>((hash_word % 0x3ffe + 1) << 2);
}

// State of a reserved entry.
struct Reservation {
    std::uint16_t session = 0;    // who may write
    std::uint16_t committed = 0;  // one bit a shard

    constexpr std::uint32_t bits() const { return std::uint32_t{session} << 16 | committed; }
    static constexpr Reservation of(std::uint32_t bits) {
        return {static_cast<std::uint16_t>(bits >> 16), static_cast<std::uint16_t>(bits)};
    }
};

// The digest of an entry with one shard. Only the writer and holders of a lease read it; it changes only while the
// entry is not readable.
struct EntryDigest {
    std::atomic<std::uint64_t> digest;
};
static_assert(sizeof(EntryDigest) == 8);

// The digests of an entry with more than one shard; pages of this region exist only where there are such entries.
constexpr std::uint32_t kShardLimit = 16;
struct ShardDigests {
    std::array<std::atomic<std::uint64_t>, kShardLimit> digest;
};
static_assert(sizeof(ShardDigests) == 128);

// Eleven entries and the number of the chain's next bucket, in one cache line. The first bucket of a chain holds its
// version. The writer increments it when it moves an entry, before it empties the old place. So a reader that finds
// nothing, and reads the same version before and after, has missed nothing. No reader ever waits for the writer, not
// even for a dead one.
struct alignas(64) Bucket {
    static constexpr std::uint32_t kCapacity = 11;
    std::atomic<std::uint64_t> low_tags;   // tags of entries 0 to 7, lowest byte first; 0: empty
    std::atomic<std::uint32_t> high_tags;  // of entries 8 to 10
    std::atomic<std::uint32_t> version;
    std::atomic<std::uint32_t> overflow;  // number of a bucket, kNoBucket: none
    std::array<std::atomic<std::uint32_t>, kCapacity> entries;
};
static_assert(sizeof(Bucket) == 64);
constexpr std::uint32_t kNoBucket = 0xffffffff;

// One group of a namespace, as the engine that registered it declared it.
struct GroupRecord {
    std::uint64_t record_bytes;  // of one shard
    std::uint32_t block_size;    // tokens
    std::uint32_t window;        // tokens; 0 where the rule has none
    std::uint32_t shards;
    std::uint8_t rule;  // BoundaryRule
    std::array<std::uint8_t, 3> reserved;
};
static_assert(sizeof(GroupRecord) == 24);

// An identity whose blocks are kept, and the number by which keys name it. Written whole before the header counts it,
// and again for the next identity that has the place: a reader that finds the same number and group count before and
// after has read one identity's record.
struct NamespaceRecord {
    std::uint32_t group_count;      // 0: no identity has the place, or its record is not whole yet
    std::uint32_t hash_block_size;  // tokens of one hash of a request's chain
    std::array<std::uint8_t, 32> fingerprint;
    std::uint32_t number;  // if no identity has the place, the last number that it had
    std::uint32_t reserved;
    std::array<GroupRecord, kGroupLimit> groups;
};

// A process that belongs to a session: the start time tells it from a later one with the same number.
struct MemberRecord {
    std::int32_t pid;
    std::uint32_t reserved;
    std::uint64_t start_ticks;
};

constexpr std::uint32_t kSessionLimit = 4096;
constexpr std::uint32_t kMemberLimit = 63;

// One engine with all its processes.
struct SessionRecord {
    std::atomic<std::uint32_t> state;  // SessionState
    std::uint32_t generation;
    std::uint64_t held_limit_bytes;
    std::uint32_t member_count;
    std::uint32_t signs;  // SessionSigns: what is known of every process that has the memory for this session
    std::array<MemberRecord, kMemberLimit> members;
};

enum SessionSigns : std::uint32_t {
    kIsSigned = 1,  // it has a sign of it, see IndexFile
    kHeeds = 2,     // it knows that memory may be given back, and marks segments that a driver has pinned
};

// A lease is a chain of nodes that list its entries; the first one carries its name. Active once `id` is set.
struct LeaseNode {
    static constexpr std::uint32_t kCapacity = 58;
    std::atomic<std::uint64_t>
        id;  // generation in the upper half, this node's number in the lower; 0: not a lease's first
    std::uint32_t session;
    std::uint32_t next;  // node number; kNoNode: the last one
    std::uint32_t count;
    std::uint32_t generation;  // of the node's next lease
    std::array<EntryNumber, kCapacity> entries;
};
static_assert(sizeof(LeaseNode) == 256);
constexpr std::uint32_t kNoNode = 0xffffffff;

// A tenant of the pool. Valid if the name is not empty; tenant 0 has no name and needs no record.
struct TenantRecord {
    std::uint64_t quota_bytes;
    std::array<char, 56> name;  // ends with a zero
};
constexpr std::uint32_t kTenantLimit = 64;

constexpr std::size_t kDomainBytes = 136;  // a name has up to 128
constexpr std::uint32_t kUserLimit = 512;

// First page of the file; the tenants are the second. The fields before `version_counter` never change after the file
// was made.
struct IndexHeader {
    std::uint64_t magic;
    std::uint32_t format;
    std::uint32_t entry_limit;
    std::uint32_t bucket_limit;
    std::uint32_t lease_node_limit;
    std::uint64_t seed;  // of the bucket hash
    std::uint64_t segment_bytes;
    std::uint64_t extent_bytes;
    std::uint64_t file_bytes;
    std::uint64_t segments_mark;            // follows from the segments' files and their order
    std::uint64_t lock_mark;                // and from the lock's: no other lock says whether the owner lives
    std::array<char, kDomainBytes> domain;  // whose memory it is; ends with a zero

    std::atomic<std::uint64_t> boot_id;           // of the process that writes
    std::atomic<std::uint64_t> version_counter;   // grows whenever the answer of a look-up may have changed
    std::atomic<std::uint32_t> bucket_count;      // of the table proper; overflow buckets lie at the end of the region
    std::atomic<std::uint32_t> entry_count;       // entries that were ever used: numbers below it may be read
    std::atomic<std::uint32_t> lease_node_count;  // the same for lease nodes
    std::atomic<std::uint32_t> namespace_count;   // and for places of namespaces
    std::atomic<std::uint32_t> session_count;     // and for sessions
    std::atomic<std::uint32_t> segment_count;
    std::atomic<std::uint32_t> clock;        // counts acquires
    std::atomic<std::uint64_t> ready_bytes;  // of the segments, from the first on: what has its pages
    // Bytes of the segments in slots that are in use. While the pool is full, all ready bytes count as used, holes
    // included.
    std::atomic<std::uint64_t> used_bytes;
    // Users that were ever given the files and may still have them mapped, each listed once. If the count exceeds the
    // number of places, any user may have them.
    std::atomic<std::uint32_t> user_count;
    std::array<std::atomic<std::uint32_t>, kUserLimit> users;
    // The server wants to give the memory from here on back to the system, and wants slots back that are held ready
    // there. 0: there is no such memory.
    std::atomic<std::uint64_t> leaving_from;
};
static_assert(sizeof(IndexHeader) <= 4096);

static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

}  // namespace kvo

// A model of a cache: the contents that it should have, in plain tables. The model has no pointers and a fixed size, so
// that it can lie in memory that outlives the process which keeps it.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "cache/cache_core.hpp"
#include "replay/make_policy.hpp"

namespace kvo::test {

inline std::uint64_t scramble(std::uint64_t value) {
    value += 0x9e3779b97f4a7c15;
    value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
    value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
    return value ^ (value >> 31);
}

constexpr std::uint32_t kHashTokens = 16;
constexpr std::size_t kSpaces = 5;
constexpr std::size_t kNamespaces = 2;

struct SpacePlan {
    std::uint32_t name_space;
    std::uint32_t group;
    GroupGeometry geometry;

    Space space() const { return make_space(name_space, group); }
};

// The size of a test's cache, and the keys it uses: `blocks` hashes of each of `chains` prompts.
struct World {
    std::uint64_t segment_bytes = 0;
    std::uint64_t extent_bytes = 0;
    std::uint32_t segments = 2;
    EntryNumber entry_limit = 0;
    std::uint32_t chains = 0;
    std::uint32_t blocks = 0;
    std::array<std::uint32_t, kSpaces> record_bytes{};
    bool verifies_always = false;
    char policy[16] = "lru";

    // Every rule but `nothing`, two shards in one group, a block of two hashes in another.
    std::array<SpacePlan, kSpaces> spaces() const {
        const auto group = [this](std::size_t i, std::uint32_t block, std::uint32_t window, std::uint32_t shards,
                                  BoundaryRule rule) {
            return GroupGeometry{
                .record_bytes = record_bytes[i], .block_size = block, .window = window, .shards = shards, .rule = rule};
        };
        return {{{0, 0, group(0, 16, 0, 1, BoundaryRule::prefix)},
                 {0, 1, group(1, 16, 48, 2, BoundaryRule::window)},
                 {0, 2, group(2, 32, 0, 1, BoundaryRule::exact)},
                 {1, 0, group(3, 16, 0, 1, BoundaryRule::prefix)},
                 {1, 1, group(4, 16, 64, 1, BoundaryRule::chunk)}}};
    }
    Geometry geometry_of(std::uint32_t name_space) const {
        Geometry geometry{.hash_block_size = kHashTokens, .groups = {}};
        for (const SpacePlan& plan : spaces()) {
            if (plan.name_space == name_space) {
                geometry.groups.push_back(plan.geometry);
            }
        }
        return geometry;
    }
    CacheOptions options() const {
        CacheOptions options;
        options.pool_bytes = segments * segment_bytes;
        options.segment_bytes = segment_bytes;
        options.extent_bytes = extent_bytes;
        options.entry_limit = entry_limit;
        options.policy = find_policy(policy).value();
        options.verify = verifies_always ? Verify::always : Verify::adopted;
        options.huge_pages = HugePages::none;
        return options;
    }
    std::uint32_t key_count() const { return static_cast<std::uint32_t>(kSpaces) * chains * blocks; }
};

inline Fingerprint fingerprint_of(std::uint32_t number) {
    Fingerprint fingerprint{};
    for (std::size_t i = 0; i < fingerprint.size(); ++i) {
        fingerprint[i] = static_cast<std::uint8_t>(scramble(number * 64 + i));
    }
    return fingerprint;
}

// A space (number in `World::spaces`), a chain and the place of a hash in it, as one number.
using KeyNumber = std::uint32_t;
using HashBytes = std::array<std::uint8_t, kHashBytes>;

inline HashBytes hash_of(std::uint32_t chain, std::uint32_t place) {
    HashBytes bytes;
    for (std::uint64_t i = 0; i < 4; ++i) {
        const std::uint64_t word = scramble((std::uint64_t{chain} << 32 | place) * 4 + i);
        std::memcpy(bytes.data() + 8 * i, &word, 8);
    }
    return bytes;
}

// Each key's record has bytes of its own, so that a wrong one is seen without any digest.
inline std::uint64_t pattern_word(KeyNumber key, std::uint32_t shard, std::uint64_t place) {
    const std::uint64_t base = (std::uint64_t{key} * 16 + shard + 1) * 0x9e3779b97f4a7c15;
    return (base + place) * 0xd1b54a32d192ed03;
}
inline void write_pattern(std::span<std::byte> record, KeyNumber key, std::uint32_t shard) {
    for (std::size_t at = 0; at < record.size(); at += 8) {
        const std::uint64_t word = pattern_word(key, shard, at / 8);
        std::memcpy(record.data() + at, &word, std::min<std::size_t>(8, record.size() - at));
    }
}
inline bool has_pattern(std::span<const std::byte> record, KeyNumber key, std::uint32_t shard) {
    std::uint64_t difference = 0;
    for (std::size_t at = 0; at < record.size(); at += 8) {
        const std::size_t length = std::min<std::size_t>(8, record.size() - at);
        std::uint64_t word = pattern_word(key, shard, at / 8);
        std::uint64_t seen = 0;
        std::memcpy(&seen, record.data() + at, length);
        difference |= (word ^ seen) & (length == 8 ? ~std::uint64_t{0} : (std::uint64_t{1} << (8 * length)) - 1);
    }
    return difference == 0;
}

// Places in the model's tables.
using RecordNumber = std::uint16_t;
constexpr std::size_t kRecordLimit = 4096;
constexpr std::size_t kModelKeys = 8192;
constexpr std::size_t kModelSessions = 8;
constexpr std::size_t kModelLeases = 32;
constexpr std::size_t kLeaseItems = 160;  // more than two nodes of the index hold
constexpr std::size_t kModelTenants = 4;

struct ModelRecord {
    enum class State : std::uint8_t { none, reserved, readable, quarantined };
    State state = State::none;
    bool is_damaged = false;     // its bytes were changed after the commit
    std::uint8_t written = 0;    // one bit a shard, while reserved
    std::uint8_t committed = 0;  // one bit a shard
    std::uint8_t session = 0;    // place, while reserved
    std::uint8_t tenant = 0;     // number
    KeyNumber key = 0;           // what it is written for
    std::uint32_t leases = 0;
    Ticket ticket = 0;
    std::uint64_t address = 0;  // while reserved or leased: it may move otherwise
    std::array<std::uint64_t, 2> digests{};
};

struct ModelLease {
    LeaseId id = 0;  // 0: none
    std::uint8_t session = 0;
    std::uint32_t count = 0;
    std::array<RecordNumber, kLeaseItems> records{};
};

enum class Member : std::uint8_t { none, self, keeper };

struct ModelSession {
    SessionId id = 0;  // 0: none
    bool is_open = false;
    Member member = Member::none;
    std::uint64_t limit_bytes = 0;
    std::uint64_t held_bytes = 0;
};

// The kinds of calls of a cache.
enum class Call : std::uint8_t {
    none,
    adopt,
    reserve,
    reserve_large,  // of the largest records, most often with moves
    commit,
    abort,
    acquire,
    acquire_entries,
    release,
    invalidate,
    clear,
    evict,
    open_session,
    end_session,
    reclaim,
    open_tenant,
    open_namespace,
    count,
};

// A call that has begun and whose result is not in the model yet.
struct Pending {
    Call call = Call::none;
    std::uint8_t session = 0;
    std::uint32_t wanted = 0;  // how many records a reserve asked for
    std::uint16_t lease = 0;
    std::uint32_t space = 0;  // number in `World::spaces`, or a namespace
    std::uint32_t count = 0;
    std::array<RecordNumber, kLeaseItems> records{};  // a commit's and an abort's
    std::array<KeyNumber, kLeaseItems> keys{};        // an invalidate's
};

struct CacheModel {
    World world;
    std::array<ModelRecord, kRecordLimit> records{};
    std::array<RecordNumber, kModelKeys> readable{};  // by key: record number + 1
    std::array<ModelLease, kModelLeases> leases{};
    std::array<ModelSession, kModelSessions> sessions{};
    std::array<std::uint64_t, kModelTenants> quotas{};  // by number; 0 is the one without a name
    std::uint32_t tenants = 1;
    std::uint32_t namespaces = 0;
    std::uint32_t record_end = 0;  // records below were ever used
    std::uint64_t evicted = 0;
    std::uint64_t mismatches = 0;
    Pending pending;

    KeyNumber key(std::size_t space, std::uint32_t chain, std::uint32_t place) const {
        return (static_cast<std::uint32_t>(space) * world.chains + chain) * world.blocks + place;
    }
    std::size_t space_of(KeyNumber key) const { return key / (world.chains * world.blocks); }
    std::uint32_t chain_of(KeyNumber key) const { return key / world.blocks % world.chains; }
    HashBytes hash(KeyNumber key) const { return hash_of(chain_of(key), key % world.blocks); }
    // A block of two hashes is called by the second.
    bool is_key(std::size_t space, std::uint32_t place) const {
        const std::uint32_t stride = world.spaces()[space].geometry.block_size / kHashTokens;
        return (place + 1) % stride == 0;
    }
    std::vector<KeyNumber> all_keys() const {
        std::vector<KeyNumber> keys;
        for (KeyNumber number = 0; number < world.key_count(); ++number) {
            if (is_key(space_of(number), number % world.blocks)) {
                keys.push_back(number);
            }
        }
        return keys;
    }
    bool is_readable(KeyNumber number) const { return readable[number] != 0; }
    ModelRecord& record_of(KeyNumber number) { return records[readable[number] - 1u]; }
    std::uint64_t slot_bytes(const ModelRecord& record) const {
        return world.spaces()[space_of(record.key)].geometry.slot_bytes();
    }

    RecordNumber add_record() {
        for (std::uint32_t i = 0; i < kRecordLimit; ++i) {
            if (records[i].state == ModelRecord::State::none) {
                record_end = std::max(record_end, i + 1);
                records[i] = {};
                return static_cast<RecordNumber>(i);
            }
        }
        throw std::runtime_error("the model is full");
    }
    // It is not readable any more, because it was removed or evicted.
    void take_name(KeyNumber number) {
        ModelRecord& record = record_of(number);
        record.state = record.leases != 0 ? ModelRecord::State::quarantined : ModelRecord::State::none;
        readable[number] = 0;
    }
    void drop_lease(ModelLease& lease) {
        for (std::uint32_t i = 0; i < lease.count; ++i) {
            ModelRecord& record = records[lease.records[i]];
            sessions[lease.session].held_bytes -= slot_bytes(record);
            if (--record.leases == 0 && record.state == ModelRecord::State::quarantined) {
                record.state = ModelRecord::State::none;
            }
        }
        lease.id = 0;
    }
    void drop_reservation(ModelRecord& record) {
        sessions[record.session].held_bytes -= slot_bytes(record);
        record.state = ModelRecord::State::none;
    }
    // All that a session holds, and the session.
    void drop_session(std::size_t place) {
        for (ModelLease& lease : leases) {
            if (lease.id != 0 && lease.session == place) {
                drop_lease(lease);
            }
        }
        for (std::uint32_t i = 0; i < record_end; ++i) {
            if (records[i].state == ModelRecord::State::reserved && records[i].session == place) {
                drop_reservation(records[i]);
            }
        }
        sessions[place] = {};
    }
};

}  // namespace kvo::test

// A small cache for tests: records whose bytes follow from their keys, and a successor that takes over.
#pragma once

#include <fcntl.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_core.hpp"
#include "check.hpp"
#include "digest/digest.hpp"
#include "index/index_file.hpp"
#include "replay/make_policy.hpp"

namespace kvo::test {

constexpr std::uint64_t kSegmentBytes = 4ull << 20;
constexpr std::uint64_t kExtentBytes = 64ull << 10;
constexpr std::uint64_t kNoLimit = ~0ull;

using Hashes = std::vector<std::uint8_t>;  // 32 bytes each

inline std::uint64_t mix(std::uint64_t number) {
    number = (number ^ (number >> 30)) * 0xbf58476d1ce4e5b9;
    number = (number ^ (number >> 27)) * 0x94d049bb133111eb;
    return number ^ (number >> 31);
}

// Hashes number [first, first + count) of a prompt.
inline Hashes chain(std::uint64_t prompt, std::size_t count, std::size_t first = 0) {
    Hashes hashes(count * kHashBytes);
    for (std::size_t i = 0; i < count; ++i) {
        for (std::uint64_t word = 0; word < 4; ++word) {
            const std::uint64_t bits = mix(mix(prompt + 1) ^ ((first + i + 1) * 4 + word));
            std::memcpy(hashes.data() + i * kHashBytes + word * sizeof(bits), &bits, sizeof(bits));
        }
    }
    return hashes;
}

inline std::span<const std::uint8_t> hash_at(std::span<const std::uint8_t> hashes, std::size_t i) {
    return hashes.subspan(i * kHashBytes, kHashBytes);
}

// A block's parent is the one before it; the first has none.
inline Hashes parents_of(const Hashes& hashes) {
    Hashes parents(hashes.size());
    if (!hashes.empty()) {
        std::copy(hashes.begin(), hashes.end() - kHashBytes, parents.begin() + kHashBytes);
    }
    return parents;
}

// Word `i` of what a record must hold.
inline std::uint64_t pattern_word(std::span<const std::uint8_t> hash, Space space, std::uint32_t shard, std::size_t i) {
    std::uint64_t key;
    std::memcpy(&key, hash.data(), sizeof(key));
    return (key ^ mix(std::uint64_t{space} << 8 | shard)) + i * 0x9e3779b97f4a7c15;
}

inline void fill_pattern(std::span<std::byte> record, std::span<const std::uint8_t> hash, Space space,
                         std::uint32_t shard) {
    for (std::size_t at = 0; at < record.size(); at += 8) {
        const std::uint64_t word = pattern_word(hash, space, shard, at / 8);
        std::memcpy(record.data() + at, &word, std::min<std::size_t>(8, record.size() - at));
    }
}

inline bool has_pattern(std::span<const std::byte> record, std::span<const std::uint8_t> hash, Space space,
                        std::uint32_t shard) {
    for (std::size_t at = 0; at < record.size(); at += 8) {
        const std::uint64_t word = pattern_word(hash, space, shard, at / 8);
        if (std::memcmp(record.data() + at, &word, std::min<std::size_t>(8, record.size() - at)) != 0) {
            return false;
        }
    }
    return !record.empty();
}

inline Fingerprint fingerprint(std::uint8_t number) {
    Fingerprint bytes{};
    bytes.fill(number);
    return bytes;
}

// Blocks of 16 tokens, one group that keeps prefixes.
inline Geometry plain_geometry(std::uint64_t record_bytes = 4096, std::uint32_t shards = 1) {
    return {.hash_block_size = 16,
            .groups = {{.record_bytes = record_bytes,
                        .block_size = 16,
                        .window = 0,
                        .shards = shards,
                        .rule = BoundaryRule::prefix}}};
}

// Every rule: 0 prefix of two shards, 1 window of 40 tokens, 2 states every 64 tokens, 3 chunks of 128, 4 nothing.
inline Geometry hybrid_geometry() {
    using enum BoundaryRule;
    return {.hash_block_size = 16,
            .groups = {{.record_bytes = 3000, .block_size = 16, .window = 0, .shards = 2, .rule = prefix},
                       {.record_bytes = 1024, .block_size = 16, .window = 40, .shards = 1, .rule = window},
                       {.record_bytes = 20000, .block_size = 64, .window = 0, .shards = 1, .rule = exact},
                       {.record_bytes = 512, .block_size = 32, .window = 128, .shards = 1, .rule = chunk},
                       {.record_bytes = 64, .block_size = 16, .window = 0, .shards = 1, .rule = nothing}}};
}

inline CacheOptions small_options(std::uint64_t segments = 1, const std::string& policy = "lru") {
    CacheOptions options;
    options.pool_bytes = segments * kSegmentBytes;
    options.segment_bytes = kSegmentBytes;
    options.extent_bytes = kExtentBytes;
    options.entry_limit = 20000;
    options.policy = find_policy(policy).value();
    options.huge_pages = HugePages::none;
    return options;
}

inline FileDescriptor duplicate(int file) { return FileDescriptor(fcntl(file, F_DUPFD_CLOEXEC, 0)); }

template <typename T>
T value_of(Result<T> result) {
    if (!result.ok()) {
        fail(__FILE__, __LINE__, result.fault().message());
    }
    return std::move(result.value());
}

enum class Growth : std::uint8_t { full, first_step };

// One cache, one tenant without a name, and as many namespaces as are opened.
class SmallCache {
public:
    explicit SmallCache(CacheOptions options = small_options(), Growth growth = Growth::full)
        : options_(std::move(options)) {
        PopulateProgress progress;
        core_ = value_of(CacheCore::create(options_, progress));
        if (growth == Growth::full) {
            CHECK_EQUAL(core_->growth().grow_fully(progress).message(), "");
        }
    }

    CacheCore& operator*() { return *core_; }
    CacheCore* operator->() { return core_.get(); }
    CacheOptions& successors_options() { return options_; }
    std::unique_ptr<CacheCore>& owner() { return core_; }

    Space open(const Geometry& geometry = plain_geometry(), std::uint8_t name = 1) {
        const std::uint32_t number = value_of(core_->namespaces().open(fingerprint(name), geometry));
        geometries_[number] = geometry;
        return make_space(number, 0);
    }
    SessionId session(std::uint64_t limit = kNoLimit) { return value_of(core_->sessions().open(limit)); }
    const GroupGeometry& group(Space space) const {
        return geometries_.at(namespace_of(space)).groups[group_of(space)];
    }

    std::span<std::byte> record(Space space, std::uint64_t address, std::uint32_t shard = 0) {
        const std::uint64_t bytes = group(space).record_bytes;
        return core_->memory().bytes_at(address + shard * bytes, bytes);
    }

    // Returns a ticket for each block that the cache decided on.
    std::vector<Ticket> reserve(SessionId session, Space space, std::span<const std::uint8_t> hashes,
                                TenantNumber tenant = 0) {
        std::vector<Ticket> tickets(hashes.size() / kHashBytes);
        tickets.resize(value_of(core_->reservations().reserve(session, tenant, space, hashes, tickets)));
        return tickets;
    }
    std::vector<std::uint64_t> locate(SessionId session, std::span<const Ticket> tickets) {
        std::vector<std::uint64_t> addresses(tickets.size());
        const Status status = core_->reservations().locate(session, tickets, addresses);
        CHECK(status.ok());
        return addresses;
    }
    void write(SessionId session, Space space, std::span<const std::uint8_t> hashes, std::span<const Ticket> tickets) {
        const std::vector<std::uint64_t> addresses = locate(session, tickets);
        for (std::size_t i = 0; i < tickets.size(); ++i) {
            for (std::uint32_t shard = 0; tickets[i] != 0 && shard < group(space).shards; ++shard) {
                fill_pattern(record(space, addresses[i], shard), hash_at(hashes, i), space, shard);
            }
        }
    }
    // One shard, the digests made by the cache.
    std::vector<CommitOutcome> commit(SessionId session, Space space, std::span<const std::uint8_t> hashes,
                                      std::span<const Ticket> tickets, std::uint32_t shard = 0,
                                      const Hashes& parents = {}) {
        std::vector<CommitOutcome> outcomes(tickets.size());
        const Status status = core_->commits().commit(session,
                                                      {.space = space,
                                                       .shard = shard,
                                                       .tickets = tickets,
                                                       .hashes = hashes.first(tickets.size() * kHashBytes),
                                                       .parents = parents,
                                                       .digests = {}},
                                                      outcomes);
        CHECK(status.ok());
        return outcomes;
    }
    // Reserves, writes and commits all shards of what is not readable yet; how many are readable then.
    std::size_t put(SessionId session, Space space, const Hashes& hashes, TenantNumber tenant = 0) {
        const std::vector<Ticket> tickets = reserve(session, space, hashes, tenant);
        write(session, space, hashes, tickets);
        Hashes parents = parents_of(hashes);
        parents.resize(tickets.size() * kHashBytes);
        std::vector<CommitOutcome> outcomes;
        for (std::uint32_t shard = 0; shard < group(space).shards; ++shard) {
            outcomes = commit(session, space, hashes, tickets, shard, parents);
        }
        std::size_t readable = 0;
        for (std::size_t i = 0; i < tickets.size(); ++i) {
            readable += tickets[i] == 0 || outcomes[i] == CommitOutcome::readable;
        }
        return readable;
    }
    bool put_one(SessionId session, Space space, std::uint64_t key, TenantNumber tenant = 0) {
        return put(session, space, chain(key, 1), tenant) == 1;
    }

    std::size_t count_readable(Space space, const Hashes& hashes) {
        std::vector<std::uint8_t> found(hashes.size() / kHashBytes);
        CHECK(core_->search().lookup(space, hashes, found).ok());
        return static_cast<std::size_t>(std::count(found.begin(), found.end(), 1));
    }
    bool has(Space space, std::uint64_t key) { return count_readable(space, chain(key, 1)) == 1; }

    // Leases these blocks and compares every byte of them; no value: a miss or a refusal.
    std::optional<Acquired> take(SessionId session, Space space, const Hashes& hashes) {
        Acquired acquired = value_of(core_->leases().acquire_entries(session, space, hashes));
        if (acquired.outcome != AcquireOutcome::hit) {
            return std::nullopt;
        }
        CHECK(is_right(acquired, space, hashes));
        return acquired;
    }
    bool is_right(const Acquired& acquired, Space space, const Hashes& hashes) {
        const LeasedGroup& leased = acquired.groups[group_of(space)];
        for (std::size_t i = 0; i < leased.addresses.size(); ++i) {
            for (std::uint32_t shard = 0; shard < group(space).shards; ++shard) {
                if (!has_pattern(record(space, leased.addresses[i], shard), hash_at(hashes, i), space, shard)) {
                    return false;
                }
            }
        }
        return leased.addresses.size() == hashes.size() / kHashBytes;
    }
    // Takes, compares and gives back. False: a miss.
    bool is_served(SessionId session, Space space, std::uint64_t key) {
        const std::optional<Acquired> acquired = take(session, space, chain(key, 1));
        return acquired && core_->leases().release(session, acquired->lease);
    }

    // Returns copies of the files that a successor needs. The lock is a new file, because this process holds the old
    // one.
    CacheFiles duplicate_files() const {
        const FileNumbers numbers = core_->memory().files();
        CacheFiles files{.lock = value_of(make_lock_file()), .index = duplicate(numbers.index), .segments = {}};
        open_index().view().header->lock_mark = value_of(mark_file(files.lock.number()));
        for (const int segment : numbers.segments) {
            files.segments.push_back(duplicate(segment));
        }
        return files;
    }
    // The index file, to be read and changed behind the cache's back.
    IndexFile open_index() const { return value_of(IndexFile::adopt(duplicate(core_->memory().files().index))); }

    // This process's cache ends and another one takes over; if it refuses, there is none. `change(view)` in between.
    template <typename Change>
    Status try_restart(Change change) {
        CacheFiles files = duplicate_files();
        core_.reset();
        {
            const IndexFile index = value_of(IndexFile::adopt(duplicate(files.index.number())));
            change(index.view());
        }
        auto successor = CacheCore::adopt(std::move(files), options_);
        if (!successor.ok()) {
            return successor.fault();
        }
        core_ = std::move(successor.value());
        return {};
    }
    template <typename Change>
    void restart(Change change) {
        const Status status = try_restart(change);
        CHECK_EQUAL(status.message(), "");
    }
    void restart() {
        restart([](const IndexView&) {});
    }

private:
    CacheOptions options_;
    std::unique_ptr<CacheCore> core_;
    std::map<std::uint32_t, Geometry> geometries_;  // by namespace
};

// An index without a cache, for its tables.
inline IndexFile small_index(EntryNumber entry_limit = 1000) {
    return value_of(IndexFile::create(
        {.entry_limit = entry_limit, .segment_bytes = kSegmentBytes, .extent_bytes = kExtentBytes}, 12345));
}

inline std::function<Status(const Region&, std::uint64_t)> reserve_in(IndexFile& index) {
    return [&index](const Region& region, std::uint64_t count) { return index.ensure(region, count); };
}

}  // namespace kvo::test

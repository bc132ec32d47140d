// Operations on a cache as bytes: any string of bytes is a list of operations, and a model is checked after each.
#pragma once

#include <unistd.h>

#include <memory>

#include "cache_calls.hpp"

namespace kvo::test {

// Bytes to make choices from; zeros when they are used up.
class ByteSource {
public:
    explicit ByteSource(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    bool is_empty() const { return bytes_.empty(); }
    std::uint32_t take() {
        if (bytes_.empty()) {
            return 0;
        }
        const std::uint8_t byte = bytes_.front();
        bytes_ = bytes_.subspan(1);
        return byte;
    }
    std::uint32_t below(std::uint32_t bound) { return take() % bound; }

private:
    std::span<const std::uint8_t> bytes_;
};

class CacheOperations {
public:
    // `keeper`: a process that lives longer than this one; sessions may be its.
    CacheOperations(CacheCalls& calls, pid_t keeper) : calls_(calls), model_(calls.model()), keeper_(keeper) {}

    void run_one(ByteSource& bytes) {
        // Each operation is drawn as often as it stands here.
        using Operation = void (CacheOperations::*)(ByteSource&);
        static constexpr std::array<Operation, 32> kOperations = {
            &CacheOperations::store,           &CacheOperations::store,
            &CacheOperations::store,           &CacheOperations::store,
            &CacheOperations::store,           &CacheOperations::store,
            &CacheOperations::reserve,         &CacheOperations::reserve,
            &CacheOperations::commit,          &CacheOperations::commit,
            &CacheOperations::commit,          &CacheOperations::abort,
            &CacheOperations::acquire,         &CacheOperations::acquire,
            &CacheOperations::acquire,         &CacheOperations::acquire,
            &CacheOperations::acquire_entries, &CacheOperations::acquire_entries,
            &CacheOperations::release,         &CacheOperations::release,
            &CacheOperations::release,         &CacheOperations::invalidate,
            &CacheOperations::clear,           &CacheOperations::evict,
            &CacheOperations::open_session,    &CacheOperations::open_session,
            &CacheOperations::end_session,     &CacheOperations::reclaim,
            &CacheOperations::open_tables,     &CacheOperations::call_wrongly,
            &CacheOperations::damage,          &CacheOperations::crowd};
        const Operation operation = kOperations[bytes.below(kOperations.size())];
        (this->*operation)(bytes);
    }

    // An operation that makes this call, if what it needs is there.
    void run_towards(Call call, ByteSource& bytes) {
        switch (call) {
            case Call::reserve_large:
                return crowd(bytes);
            case Call::commit:
                return store(bytes);
            case Call::abort:
                return abort(bytes);
            case Call::acquire:
                return acquire(bytes);
            case Call::acquire_entries:
                return acquire_entries(bytes);
            case Call::release:
                return release(bytes);
            case Call::invalidate:
                return invalidate(bytes);
            case Call::clear:
                return calls_.clear(bytes.below(kNamespaces));
            case Call::evict:
                return evict(bytes);
            case Call::open_session:
                return open_session(bytes);
            case Call::end_session:
                return end_session(bytes);
            case Call::reclaim:
                return reclaim(bytes);
            case Call::open_tenant:
            case Call::open_namespace:
                return open_tables(bytes);
            default:
                return store(bytes);
        }
    }

    void open_session(ByteSource& bytes) {
        for (std::size_t place = 0; place < kModelSessions; ++place) {
            const ModelSession& session = model_.sessions[place];
            if (session.id != 0 && !session.is_open && session.member != Member::none) {
                calls_.reopen_session(place, session.member, process_of(session.member));
                return;
            }
        }
        if (std::ranges::count(model_.sessions, SessionId{0}, &ModelSession::id) < 2) {
            return;  // one is left for a check
        }
        const auto member = static_cast<Member>(bytes.below(3));
        const std::uint64_t large = model_.world.spaces()[2].geometry.slot_bytes();
        calls_.open_session(bytes.below(4) == 0 ? 3 * large : std::uint64_t{1} << 40, member, process_of(member));
    }

private:
    pid_t process_of(Member member) const { return member == Member::keeper ? keeper_ : getpid(); }

    std::optional<std::size_t> choose_session(ByteSource& bytes) {
        const std::uint32_t first = bytes.below(kModelSessions);
        for (std::uint32_t i = 0; i < kModelSessions; ++i) {
            if (model_.sessions[(first + i) % kModelSessions].id != 0) {
                return (first + i) % kModelSessions;
            }
        }
        return std::nullopt;
    }
    std::vector<KeyNumber> choose_keys(std::size_t space, std::uint32_t chain, std::uint32_t first,
                                       std::uint32_t count) const {
        std::vector<KeyNumber> keys;
        for (std::uint32_t place = first; place < model_.world.blocks && keys.size() < count; ++place) {
            if (model_.is_key(space, place)) {
                keys.push_back(model_.key(space, chain, place));
            }
        }
        return keys;
    }
    std::vector<RecordNumber> reservations(std::size_t session, std::size_t space, std::size_t limit) const {
        std::vector<RecordNumber> numbers;
        for (std::uint32_t i = 0; i < model_.record_end && numbers.size() < limit; ++i) {
            const ModelRecord& record = model_.records[i];
            if (record.state == ModelRecord::State::reserved && record.session == session &&
                model_.space_of(record.key) == space) {
                numbers.push_back(static_cast<RecordNumber>(i));
            }
        }
        return numbers;
    }
    std::uint32_t shards_of(std::size_t space) const { return model_.world.spaces()[space].geometry.shards; }

    void write_and_commit(std::size_t session, std::size_t space, const std::vector<RecordNumber>& records,
                          bool with_digests) {
        for (std::uint32_t shard = 0; shard < shards_of(space) && !records.empty(); ++shard) {
            for (const RecordNumber record : records) {
                calls_.write(record, shard);
            }
            calls_.commit(session, space, shard, records, with_digests, false);
        }
    }

    // Stores the blocks that an engine stores of a prompt: prefix blocks, the last ones of the window, the last state.
    void store(ByteSource& bytes) {
        const auto session = choose_session(bytes);
        if (!session) {
            return;
        }
        const std::uint32_t name_space = bytes.below(kNamespaces);
        const std::uint32_t chain = bytes.below(model_.world.chains);
        const std::uint32_t end = 1 + bytes.below(model_.world.blocks);
        const std::uint32_t tenant = bytes.below(model_.tenants);
        const std::uint32_t style = bytes.take();
        for (std::size_t space = 0; space < kSpaces; ++space) {
            const SpacePlan plan = model_.world.spaces()[space];
            if (plan.name_space != name_space) {
                continue;
            }
            const std::uint32_t last = plan.geometry.rule == BoundaryRule::exact ? 2 : 4;
            const std::uint32_t first = plan.geometry.rule == BoundaryRule::prefix ? 0 : end - std::min(end, last);
            const auto keys = choose_keys(space, chain, first, end - first);
            if (!keys.empty()) {
                const auto records =
                    calls_.reserve(*session, static_cast<TenantNumber>(tenant), space, keys, (style & 15) != 0);
                write_and_commit(*session, space, records, (style & 16) != 0);
            }
        }
    }

    void reserve(ByteSource& bytes) {
        const auto session = choose_session(bytes);
        const std::size_t space = bytes.below(kSpaces);
        if (!session || reservations(*session, space, 17).size() > 16) {
            return;
        }
        const auto keys =
            choose_keys(space, bytes.below(model_.world.chains), bytes.below(model_.world.blocks), 1 + bytes.below(6));
        if (keys.empty()) {
            return;
        }
        const std::uint32_t style = bytes.take();
        const auto tenant = static_cast<TenantNumber>(bytes.below(model_.tenants));
        const auto records = calls_.reserve(*session, tenant, space, keys, (style & 7) != 0);
        for (const RecordNumber record : records) {
            if ((style & 8) != 0) {
                calls_.write(record, 0);
            }
        }
    }

    void commit(ByteSource& bytes) {
        const auto session = choose_session(bytes);
        const std::size_t space = bytes.below(kSpaces);
        if (!session) {
            return;
        }
        const auto records = reservations(*session, space, 1 + bytes.below(8));
        const std::uint32_t shard = bytes.below(shards_of(space));
        const std::uint32_t style = bytes.take();
        if (!records.empty()) {
            for (const RecordNumber record : records) {
                calls_.write(record, shard);
            }
            calls_.commit(*session, space, shard, records, (style & 1) != 0, (style & 14) == 14);
        }
    }

    void abort(ByteSource& bytes) {
        const auto session = choose_session(bytes);
        const std::size_t space = bytes.below(kSpaces);
        if (session) {
            calls_.abort(*session, reservations(*session, space, bytes.below(20)));
        }
    }

    // One lease is left for a check.
    bool has_leases() const { return std::ranges::count(model_.leases, LeaseId{0}, &ModelLease::id) > 1; }

    void acquire(ByteSource& bytes) {
        const auto session = choose_session(bytes);
        if (!session || !has_leases()) {
            return;
        }
        BoundaryQuery query{.name_space = bytes.below(kNamespaces), .chain = {}};
        std::uint32_t chain = bytes.below(model_.world.chains);
        const std::uint32_t known = bytes.below(model_.world.blocks + 1);
        const std::uint32_t local = bytes.take();
        query.local = local < 128 ? 0 : local - 128;
        const std::uint32_t limit = bytes.take();
        query.limit = limit < 128 ? std::uint64_t{1} << 20 : (limit - 128) * 4;
        const std::uint32_t alignment = bytes.below(16);
        query.alignment = alignment < 12 ? 1 : 1u << (alignment - 8);
        std::vector<std::uint8_t> hashes(known * kHashBytes);
        query.chain = hashes;
        // Most often the next prompt that has something stored.
        const std::uint32_t tries = bytes.below(4) == 0 ? 0 : model_.world.chains;
        for (std::uint32_t i = 0; i < tries && calls_.find_boundary(query, chain) == query.local; ++i) {
            chain = (chain + 1) % model_.world.chains;
        }
        for (std::uint32_t place = 0; place < known; ++place) {
            std::ranges::copy(hash_of(chain, place), hashes.begin() + place * kHashBytes);
        }
        calls_.acquire(*session, query, chain, bytes.below(3));
    }

    // Acquires entries of so many chains that the lease fills several nodes.
    void acquire_entries(ByteSource& bytes) {
        const auto session = choose_session(bytes);
        if (!session || !has_leases()) {
            return;
        }
        const std::size_t space = bytes.below(kSpaces);
        const std::uint32_t wanted = bytes.below(kLeaseItems);
        const std::uint32_t first = bytes.below(model_.world.chains);
        const std::uint32_t style = bytes.take();
        std::vector<KeyNumber> keys;
        for (std::uint32_t i = 0; i < model_.world.chains; ++i) {
            for (const KeyNumber key : choose_keys(space, (first + i) % model_.world.chains, 0, model_.world.blocks)) {
                if (keys.size() < wanted && model_.is_readable(key)) {
                    keys.push_back(key);
                }
            }
        }
        if (style == 0) {
            keys = choose_keys(space, first, 0, model_.world.blocks);
        } else if ((style & 31) == 1 && !keys.empty() && keys.size() < kLeaseItems) {
            keys.push_back(keys.front());
        }
        calls_.acquire_entries(*session, space, keys, bytes.below(2));
    }

    void release(ByteSource& bytes) {
        const std::uint32_t first = bytes.below(kModelLeases);
        std::uint32_t left = 1 + bytes.below(3);
        for (std::uint32_t i = 0; i < kModelLeases && left > 0; ++i) {
            const std::size_t lease = (first + i) % kModelLeases;
            if (model_.leases[lease].id != 0) {
                calls_.release(lease);
                --left;
            }
        }
    }

    void invalidate(ByteSource& bytes) {
        const std::size_t space = bytes.below(kSpaces);
        const std::uint32_t chain = bytes.below(model_.world.chains);
        const std::uint32_t first = bytes.below(model_.world.blocks);
        calls_.invalidate(space, choose_keys(space, chain, first, 1 + bytes.below(6)));
    }

    void clear(ByteSource& bytes) {
        if (bytes.below(8) == 0) {
            calls_.clear(bytes.below(kNamespaces));
        }
    }

    void evict(ByteSource& bytes) {
        const std::uint64_t unit = model_.world.record_bytes[2] / 4;
        calls_.evict(bytes.below(64) == 0 ? std::uint64_t{1} << 40 : bytes.below(16) * unit);
    }

    void end_session(ByteSource& bytes) {
        if (const auto session = choose_session(bytes); session && model_.sessions[*session].is_open) {
            calls_.quarantine_session(*session);
        }
    }

    void reclaim(ByteSource&) { calls_.reclaim(); }

    void open_tables(ByteSource& bytes) {
        if (bytes.below(2) == 0) {
            const std::uint32_t number = 1 + bytes.below(std::min<std::uint32_t>(model_.tenants, kModelTenants - 1));
            const std::uint64_t quota = bytes.below(4) * model_.world.record_bytes[2] * 4;
            calls_.open_tenant(number, quota);
        } else {
            const std::uint32_t number = bytes.below(std::min(model_.namespaces + 1, 24u));
            calls_.open_namespace(number);
        }
    }

    void call_wrongly(ByteSource& bytes) {
        if (const auto session = choose_session(bytes); session) {
            calls_.call_wrongly(*session);
        }
    }

    void damage(ByteSource& bytes) {
        const ModelLease& lease = model_.leases[bytes.below(kModelLeases)];
        if (model_.world.verifies_always && lease.id != 0) {
            calls_.damage(lease.records[bytes.below(lease.count)]);
        }
    }

    // Holes among the small ones, then the largest: extents change hands, records move.
    void crowd(ByteSource& bytes) {
        const std::uint32_t parity = bytes.below(2);
        for (std::uint32_t chain = 0; chain < model_.world.chains; ++chain) {
            std::vector<KeyNumber> keys;
            for (std::uint32_t place = parity; place < model_.world.blocks; place += 2) {
                keys.push_back(model_.key(0, chain, place));
            }
            calls_.invalidate(0, keys);
        }
        const auto session = choose_session(bytes);
        if (session) {
            const std::uint32_t chain = bytes.below(model_.world.chains);
            const auto records = calls_.reserve(*session, 0, 2, choose_keys(2, chain, 0, 1 + bytes.below(8)), true);
            write_and_commit(*session, 2, records, true);
        }
    }

    CacheCalls& calls_;
    CacheModel& model_;
    const pid_t keeper_;
};

}  // namespace kvo::test

#include <algorithm>
#include <map>
#include <set>

#include "cache_calls.hpp"

namespace kvo::test {

std::vector<KeyNumber> CacheCalls::needed_keys(const BoundaryQuery& query, std::uint32_t chain,
                                               std::uint64_t boundary) const {
    std::vector<KeyNumber> keys;
    for (std::size_t space = 0; space < kSpaces; ++space) {
        const GroupGeometry& group = spaces_[space].geometry;
        if (spaces_[space].name_space != query.name_space) {
            continue;
        }
        for (std::uint64_t begin = 0; begin + group.block_size <= boundary; begin += group.block_size) {
            const std::uint64_t end = begin + group.block_size;
            const bool is_seen = (group.rule == BoundaryRule::prefix) ||
                                 (group.rule == BoundaryRule::window && end + group.window > boundary + 1) ||
                                 (group.rule == BoundaryRule::chunk && begin / group.window == boundary / group.window);
            const bool is_state = group.rule == BoundaryRule::exact && end == boundary;
            if (is_state || (is_seen && end > query.local)) {
                keys.push_back(model_.key(space, chain, static_cast<std::uint32_t>(end / kHashTokens - 1)));
            }
        }
    }
    return keys;
}

std::uint64_t CacheCalls::find_boundary(const BoundaryQuery& query, std::uint32_t chain) const {
    const std::uint64_t hashed = query.chain.size() / kHashBytes * kHashTokens;
    for (std::uint64_t boundary = std::min(query.limit, hashed); boundary > query.local; --boundary) {
        const bool is_whole = std::ranges::all_of(spaces_, [&](const SpacePlan& plan) {
            return plan.name_space != query.name_space || boundary % plan.geometry.block_size == 0;
        });
        if (!is_whole || boundary % query.alignment != 0) {
            continue;
        }
        const std::vector<KeyNumber> keys = needed_keys(query, chain, boundary);
        if (std::ranges::all_of(keys, [&](KeyNumber key) { return model_.is_readable(key); })) {
            return boundary;
        }
    }
    return query.local;
}

void CacheCalls::acquire(std::size_t place, const BoundaryQuery& query, std::uint32_t chain, std::uint32_t shard) {
    std::vector<KeyNumber> keys;
    for (std::size_t space = 0; space < kSpaces; ++space) {
        for (std::uint32_t block = 0; block < model_.world.blocks; ++block) {
            if (spaces_[space].name_space == query.name_space && model_.is_key(space, block)) {
                keys.push_back(model_.key(space, chain, block));
            }
        }
    }
    sync(keys);
    if (!free_lease()) {
        return;
    }
    model_.pending.session = static_cast<std::uint8_t>(place);
    const auto acquired = perform(
        Call::acquire, [&] { return core_.leases().acquire(model_.sessions[place].id, query, std::span(&shard, 1)); });
    CHECK(acquired.ok());
    std::uint64_t boundary = find_boundary(query, chain);
    keys = needed_keys(query, chain, boundary);
    while (boundary > query.local && remove_damaged(keys)) {
        boundary = find_boundary(query, chain);
        keys = needed_keys(query, chain, boundary);
    }
    if (boundary == query.local) {
        keys.clear();
    }
    const AcquireOutcome outcome = boundary == query.local ? AcquireOutcome::miss : expect_lease(place, keys);
    CHECK(acquired.value().outcome == outcome);
    CHECK_EQUAL(acquired.value().boundary, outcome == AcquireOutcome::hit ? boundary : query.local);
    count_outcome(outcome);
    if (outcome == AcquireOutcome::hit) {
        take_lease(place, acquired.value(), keys, shard);
    }
    settle();
}

void CacheCalls::acquire_entries(std::size_t place, std::size_t space, const std::vector<KeyNumber>& keys,
                                 std::uint32_t shard) {
    sync(keys);
    if (!free_lease()) {
        return;
    }
    model_.pending.session = static_cast<std::uint8_t>(place);
    const auto acquired = perform(Call::acquire_entries, [&] {
        return core_.leases().acquire_entries(model_.sessions[place].id, spaces_[space].space(), hashes_of(keys),
                                              std::span(&shard, 1));
    });
    CHECK(acquired.ok());
    const bool are_readable =
        !keys.empty() && std::ranges::all_of(keys, [&](KeyNumber key) { return model_.is_readable(key); });
    const bool is_hit = are_readable && !remove_damaged(keys);
    const AcquireOutcome outcome = is_hit ? expect_lease(place, keys) : AcquireOutcome::miss;
    CHECK(acquired.value().outcome == outcome);
    count_outcome(outcome);
    if (outcome == AcquireOutcome::hit) {
        take_lease(place, acquired.value(), keys, shard);
    }
    settle();
}

// Finds the records that reading these keys finds damaged, if the world checks records at each use. All of them lose
// their names at once.
bool CacheCalls::remove_damaged(const std::vector<KeyNumber>& keys) {
    if (!model_.world.verifies_always) {
        return false;
    }
    std::vector<KeyNumber> damaged;
    for (const KeyNumber key : keys) {
        if (model_.record_of(key).is_damaged) {
            damaged.push_back(key);
        }
    }
    for (const KeyNumber key : damaged) {
        if (model_.is_readable(key)) {
            ++model_.mismatches;
            model_.take_name(key);
        }
    }
    return !damaged.empty();
}

AcquireOutcome CacheCalls::expect_lease(std::size_t place, const std::vector<KeyNumber>& keys) {
    std::uint64_t bytes = 0;
    std::map<TenantNumber, std::uint64_t> first_leased;
    for (const KeyNumber key : std::set<KeyNumber>(keys.begin(), keys.end())) {
        const std::uint64_t slot_bytes = spaces_[model_.space_of(key)].geometry.slot_bytes();
        bytes += slot_bytes;
        if (const ModelRecord& record = model_.record_of(key); record.leases == 0) {
            first_leased[record.tenant] += slot_bytes;
        }
    }
    const ModelSession& session = model_.sessions[place];
    const bool is_granted =
        session.is_open && session.held_bytes + bytes <= session.limit_bytes &&
        std::ranges::all_of(first_leased, [&](const auto& one) { return may_hold(one.first, one.second); });
    return is_granted ? AcquireOutcome::hit : AcquireOutcome::over_limit;
}

void CacheCalls::take_lease(std::size_t place, const Acquired& acquired, const std::vector<KeyNumber>& keys,
                            std::uint32_t shard) {
    ModelLease& lease = model_.leases[*free_lease()];
    CHECK(acquired.lease != 0);
    for (const ModelLease& other : model_.leases) {
        CHECK(other.id != acquired.lease);
    }
    lease.id = acquired.lease;
    lease.session = static_cast<std::uint8_t>(place);
    lease.count = 0;
    std::size_t next = 0;
    for (std::size_t group = 0; group < acquired.groups.size(); ++group) {
        const LeasedGroup& leased = acquired.groups[group];
        CHECK_EQUAL(leased.addresses.size(), leased.digests.size());
        for (std::size_t i = 0; i < leased.addresses.size(); ++i, ++next) {
            CHECK(next < keys.size());
            const SpacePlan& plan = spaces_[model_.space_of(keys[next])];
            CHECK_EQUAL(plan.group, group);
            ModelRecord& record = model_.record_of(keys[next]);
            CHECK(record.leases == 0 || record.address == leased.addresses[i]);
            record.address = leased.addresses[i];
            const auto number = static_cast<RecordNumber>(model_.readable[keys[next]] - 1);
            // One that is named again is leased once.
            if (std::find(keys.begin(), keys.begin() + next, keys[next]) == keys.begin() + next) {
                ++record.leases;
                model_.sessions[place].held_bytes += plan.geometry.slot_bytes();
                lease.records[lease.count++] = number;
            }
            check_apart(number);
            CHECK_EQUAL(leased.digests[i], shard < plan.geometry.shards ? record.digests[shard] : kNoDigest);
            for (std::uint32_t s = 0; s < plan.geometry.shards; ++s) {
                CHECK(record.is_damaged || has_pattern(record_bytes(record, s), record.key, s));
            }
        }
    }
    CHECK_EQUAL(next, keys.size());
}

// One bit of a leased record turns over, as in bad memory.
void CacheCalls::damage(RecordNumber number) {
    ModelRecord& record = model_.records[number];
    if (!record.is_damaged) {
        record_bytes(record, 0).front() ^= std::byte{1};
        record.is_damaged = true;
    }
}

std::optional<std::size_t> CacheCalls::free_lease() const {
    for (std::size_t i = 0; i < kModelLeases; ++i) {
        if (model_.leases[i].id == 0) {
            return i;
        }
    }
    return std::nullopt;
}

}  // namespace kvo::test

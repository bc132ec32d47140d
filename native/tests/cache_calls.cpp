#include "cache_calls.hpp"

#include <algorithm>
#include <string_view>

namespace kvo::test {

void CacheCalls::open_world() {
    for (std::uint32_t i = 0; i < kNamespaces; ++i) {
        open_namespace(i);
    }
}

std::vector<RecordNumber> CacheCalls::reserve(std::size_t place, TenantNumber tenant, std::size_t space,
                                              const std::vector<KeyNumber>& keys, bool is_named) {
    sync(keys);
    ModelSession& session = model_.sessions[place];
    const std::vector<std::uint8_t> hashes = is_named ? hashes_of(keys) : std::vector<std::uint8_t>{};
    std::vector<bool> was_readable;
    for (const KeyNumber key : keys) {
        was_readable.push_back(is_named && model_.is_readable(key));
    }
    std::vector<Ticket> tickets(keys.size());
    model_.pending.session = static_cast<std::uint8_t>(place);
    model_.pending.wanted = static_cast<std::uint32_t>(keys.size());
    model_.pending.space = static_cast<std::uint32_t>(space);
    const auto decided = perform(space == 2 ? Call::reserve_large : Call::reserve, [&] {
        return core_.reservations().reserve(session.id, tenant, spaces_[space].space(), hashes, tickets);
    });
    CHECK(decided.ok());
    std::vector<RecordNumber> reserved;
    for (std::size_t i = 0; i < decided.value(); ++i) {
        CHECK_EQUAL(tickets[i] == 0, was_readable[i]);
        if (tickets[i] != 0) {
            reserved.push_back(take_reservation(place, tenant, keys[i], tickets[i]));
        }
    }
    settle();
    if (decided.value() < keys.size()) {
        CHECK(!was_readable[decided.value()]);
        ++refused_;
        const std::uint64_t slot_bytes = spaces_[space].geometry.slot_bytes();
        const bool may_have =
            session.is_open && session.held_bytes + slot_bytes <= session.limit_bytes && may_hold(tenant, slot_bytes);
        // Where records in use stand in between, it gives up before everything else is gone, but not at once.
        const std::uint64_t before = used_bytes();
        sync_all();
        if (may_have && before - used_bytes() < 2 * slot_bytes) {
            check_nothing_to_evict(tenant, slot_bytes);
        }
    }
    return reserved;
}

RecordNumber CacheCalls::take_reservation(std::size_t place, TenantNumber tenant, KeyNumber key, Ticket ticket) {
    ModelSession& session = model_.sessions[place];
    CHECK(session.is_open);
    session.held_bytes += spaces_[model_.space_of(key)].geometry.slot_bytes();
    CHECK(session.held_bytes <= session.limit_bytes);
    const RecordNumber number = model_.add_record();
    ModelRecord& record = model_.records[number];
    record = {.state = ModelRecord::State::reserved,
              .session = static_cast<std::uint8_t>(place),
              .tenant = static_cast<std::uint8_t>(tenant),
              .key = key,
              .ticket = ticket};
    CHECK(core_.reservations().locate(session.id, std::span(&ticket, 1), std::span(&record.address, 1)).ok());
    check_apart(number);
    return number;
}

void CacheCalls::write(RecordNumber number, std::uint32_t shard) {
    ModelRecord& record = model_.records[number];
    write_pattern(record_bytes(record, shard), record.key, shard);
    record.written |= static_cast<std::uint8_t>(1u << shard);
}

void CacheCalls::commit(std::size_t place, std::size_t space, std::uint32_t shard,
                        const std::vector<RecordNumber>& numbers, bool with_digests, bool is_stale) {
    std::vector<KeyNumber> keys;
    std::vector<Ticket> tickets;
    std::vector<std::uint64_t> digests;
    std::vector<std::uint8_t> parents;
    for (const RecordNumber number : numbers) {
        const ModelRecord& record = model_.records[number];
        keys.push_back(record.key);
        tickets.push_back(record.ticket + (is_stale ? std::uint64_t{1} << 32 : 0));
        digests.push_back(digest_of(record, shard));
        append_parent(parents, record.key);
    }
    sync(keys);
    std::ranges::copy(numbers, model_.pending.records.begin());
    model_.pending.count = static_cast<std::uint32_t>(numbers.size());
    model_.pending.session = static_cast<std::uint8_t>(place);
    const std::vector<std::uint8_t> hashes = hashes_of(keys);
    std::vector<CommitOutcome> outcomes(numbers.size());
    const CommitBatch batch{.space = spaces_[space].space(),
                            .shard = shard,
                            .tickets = tickets,
                            .hashes = hashes,
                            .parents = parents,
                            .digests = with_digests ? digests : std::span<const std::uint64_t>{}};
    const Status status =
        perform(Call::commit, [&] { return core_.commits().commit(model_.sessions[place].id, batch, outcomes); });
    CHECK(status.ok());
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        const bool is_valid = model_.sessions[place].is_open && !is_stale;
        CHECK(outcomes[i] == (is_valid ? apply_commit(numbers[i], shard, digests[i]) : CommitOutcome::stale));
    }
    settle();
}

CommitOutcome CacheCalls::apply_commit(RecordNumber number, std::uint32_t shard, std::uint64_t digest) {
    ModelRecord& record = model_.records[number];
    const std::uint32_t shards = spaces_[model_.space_of(record.key)].geometry.shards;
    record.committed |= static_cast<std::uint8_t>(1u << shard);
    record.digests[shard] = digest;
    if (record.committed != (1u << shards) - 1) {
        return CommitOutcome::incomplete;
    }
    model_.drop_reservation(record);
    if (model_.is_readable(record.key)) {
        ++duplicates_;
        return CommitOutcome::duplicate;
    }
    record.state = ModelRecord::State::readable;
    model_.readable[record.key] = static_cast<RecordNumber>(number + 1);
    return CommitOutcome::readable;
}

void CacheCalls::abort(std::size_t place, const std::vector<RecordNumber>& numbers) {
    std::vector<Ticket> tickets;
    for (const RecordNumber number : numbers) {
        tickets.push_back(model_.records[number].ticket);
    }
    std::ranges::copy(numbers, model_.pending.records.begin());
    model_.pending.count = static_cast<std::uint32_t>(numbers.size());
    const std::size_t aborted =
        perform(Call::abort, [&] { return core_.reservations().abort(model_.sessions[place].id, tickets); });
    CHECK_EQUAL(aborted, numbers.size());
    for (const RecordNumber number : numbers) {
        model_.drop_reservation(model_.records[number]);
    }
    settle();
}

void CacheCalls::release(std::size_t place) {
    ModelLease& lease = model_.leases[place];
    model_.pending.lease = static_cast<std::uint16_t>(place);
    CHECK(perform(Call::release, [&] { return core_.leases().release(model_.sessions[lease.session].id, lease.id); }));
    model_.drop_lease(lease);
    settle();
}

void CacheCalls::invalidate(std::size_t space, const std::vector<KeyNumber>& keys) {
    sync(keys);
    std::ranges::copy(keys, model_.pending.keys.begin());
    model_.pending.count = static_cast<std::uint32_t>(keys.size());
    const std::size_t removed =
        perform(Call::invalidate, [&] { return core_.removals().invalidate(spaces_[space].space(), hashes_of(keys)); });
    std::size_t expected = 0;
    for (const KeyNumber key : keys) {
        if (model_.is_readable(key)) {
            model_.take_name(key);
            ++expected;
        }
    }
    CHECK_EQUAL(removed, expected);
    settle();
}

void CacheCalls::clear(std::uint32_t name_space) {
    sync_all();
    model_.pending.space = name_space;
    const std::size_t removed = perform(Call::clear, [&] { return core_.removals().clear(name_space); });
    std::size_t expected = 0;
    for (KeyNumber key = 0; key < model_.world.key_count(); ++key) {
        if (model_.is_readable(key) && spaces_[model_.space_of(key)].name_space == name_space) {
            model_.take_name(key);
            ++expected;
        }
    }
    CHECK_EQUAL(removed, expected);
    settle();
}

void CacheCalls::evict(std::uint64_t bytes) {
    sync_all();
    const std::uint64_t before = core_.stats().used_bytes;
    const std::uint64_t freed = perform(Call::evict, [&] { return core_.removals().evict(bytes); });
    settle();
    CHECK_EQUAL(freed, before - core_.stats().used_bytes);
    if (freed < bytes) {
        check_nothing_to_evict();
    }
}

void CacheCalls::sync(const std::vector<KeyNumber>& keys) {
    for (std::size_t begin = 0; begin < keys.size();) {
        const std::size_t space = model_.space_of(keys[begin]);
        std::vector<KeyNumber> part;
        for (; begin < keys.size() && model_.space_of(keys[begin]) == space; ++begin) {
            part.push_back(keys[begin]);
        }
        std::vector<std::uint8_t> found(part.size());
        CHECK(core_.search().lookup(spaces_[space].space(), hashes_of(part), found).ok());
        for (std::size_t i = 0; i < part.size(); ++i) {
            see(part[i], found[i] != 0);
        }
    }
}

void CacheCalls::sync_all() { sync(model_.all_keys()); }

void CacheCalls::see(KeyNumber key, bool is_found) {
    if (model_.is_readable(key) == is_found) {
        return;
    }
    CHECK(!is_found);                               // nothing becomes readable by itself
    CHECK_EQUAL(model_.record_of(key).leases, 0u);  // nothing goes that is leased
    model_.take_name(key);
    ++model_.evicted;
}

void CacheCalls::check_apart(RecordNumber number) {
    const ModelRecord& own = model_.records[number];
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& other = model_.records[i];
        if (i != number && other.state != ModelRecord::State::none && is_pinned(other)) {
            CHECK(own.address + model_.slot_bytes(own) <= other.address ||
                  other.address + model_.slot_bytes(other) <= own.address);
        }
    }
}

// Of the model, with what was evicted since it was last brought up to date.
std::uint64_t CacheCalls::used_bytes() const {
    std::uint64_t bytes = 0;
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        bytes += model_.records[i].state == ModelRecord::State::none ? 0 : model_.slot_bytes(model_.records[i]);
    }
    return bytes;
}

bool CacheCalls::is_over_quota(TenantNumber tenant, std::uint64_t more_bytes) const {
    std::uint64_t bytes = more_bytes;
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& record = model_.records[i];
        const bool is_its_own = record.state != ModelRecord::State::none && record.tenant == tenant;
        bytes += is_its_own ? model_.slot_bytes(record) : 0;
    }
    return model_.quotas[tenant] != 0 && bytes > model_.quotas[tenant];
}

// Returns whether the tenant would stay within its quota with these bytes in use as well.
bool CacheCalls::may_hold(TenantNumber tenant, std::uint64_t more_bytes) const {
    std::uint64_t bytes = more_bytes;
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& record = model_.records[i];
        const bool is_held = record.state != ModelRecord::State::none && is_pinned(record);
        bytes += is_held && record.tenant == tenant ? model_.slot_bytes(record) : 0;
    }
    return model_.quotas[tenant] == 0 || bytes <= model_.quotas[tenant];
}

// For a tenant that is over its quota or has none, no record of a tenant within its own quota is evicted.
void CacheCalls::check_nothing_to_evict(TenantNumber wanting, std::uint64_t wanted_bytes) {
    sync_all();
    const bool is_over = is_over_quota(wanting, wanted_bytes);
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& record = model_.records[i];
        const bool is_within = record.tenant != wanting && !is_over_quota(record.tenant);
        if (is_within && (is_over || (model_.quotas[wanting] == 0 && model_.quotas[record.tenant] != 0))) {
            continue;
        }
        CHECK(record.state != ModelRecord::State::readable || record.leases != 0 || may_carry_leased(record));
    }
}

// A policy that keeps prefix order does not offer a block while one behind it, or what belongs to one, is in use; nor
// the windows that a state in use needs.
bool CacheCalls::may_carry_leased(const ModelRecord& record) const {
    const SpacePlan& plan = spaces_[model_.space_of(record.key)];
    if (std::string_view(model_.world.policy) != "prefix" || plan.geometry.rule == BoundaryRule::exact) {
        return false;
    }
    const auto is_leased_behind = [&](const ModelRecord& other) {
        return other.state == ModelRecord::State::readable && other.leases != 0 &&
               spaces_[model_.space_of(other.key)].name_space == plan.name_space &&
               model_.chain_of(other.key) == model_.chain_of(record.key) &&
               other.key % model_.world.blocks >= record.key % model_.world.blocks;
    };
    return std::any_of(model_.records.begin(), model_.records.begin() + model_.record_end, is_leased_behind);
}

std::uint64_t CacheCalls::digest_of(const ModelRecord& record, std::uint32_t shard) {
    const std::span<const std::byte> bytes = record_bytes(record, shard);
    const SpacePlan& plan = spaces_[model_.space_of(record.key)];
    const Fingerprint fingerprint = fingerprint_of(plan.name_space);
    const HashBytes hash = model_.hash(record.key);
    return digest_record({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()},
                         RecordName{fingerprint, hash, plan.group, shard});
}

void CacheCalls::append_parent(std::vector<std::uint8_t>& parents, KeyNumber key) const {
    const bool is_prefix = spaces_[model_.space_of(key)].geometry.rule == BoundaryRule::prefix;
    const std::uint32_t place = key % model_.world.blocks;
    HashBytes parent{};
    if (!is_prefix || place != 0) {
        parent = model_.hash(is_prefix ? key - 1 : key);
    }
    parents.insert(parents.end(), parent.begin(), parent.end());
}

std::span<std::byte> CacheCalls::record_bytes(const ModelRecord& record, std::uint32_t shard) {
    const std::uint64_t bytes = spaces_[model_.space_of(record.key)].geometry.record_bytes;
    const auto part = core_.memory().bytes_at(record.address + shard * bytes, bytes);
    CHECK_EQUAL(part.size(), bytes);
    return part;
}

std::vector<std::uint8_t> CacheCalls::hashes_of(const std::vector<KeyNumber>& keys) const {
    std::vector<std::uint8_t> bytes;
    for (const KeyNumber key : keys) {
        const HashBytes hash = model_.hash(key);
        bytes.insert(bytes.end(), hash.begin(), hash.end());
    }
    return bytes;
}

void CacheCalls::check_bytes() {
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& record = model_.records[i];
        if (record.state == ModelRecord::State::none || !is_pinned(record) || record.is_damaged) {
            continue;
        }
        for (std::uint32_t shard = 0; shard < spaces_[model_.space_of(record.key)].geometry.shards; ++shard) {
            const bool is_written = record.leases != 0 || (record.written >> shard & 1) != 0;
            CHECK(!is_written || has_pattern(record_bytes(record, shard), record.key, shard));
        }
    }
}

void CacheCalls::check_all() {
    sync_all();
    check_bytes();
    std::uint64_t used_bytes = 0;
    std::array<std::uint64_t, 4> by_state{};
    std::array<std::uint64_t, kModelTenants> by_tenant{};
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& record = model_.records[i];
        ++by_state[static_cast<std::size_t>(record.state)];
        if (record.state != ModelRecord::State::none) {
            used_bytes += model_.slot_bytes(record);
            by_tenant[record.tenant] += model_.slot_bytes(record);
        }
    }
    const CacheStats stats = core_.stats();
    CHECK_EQUAL(stats.used_bytes, used_bytes);
    CHECK_EQUAL(stats.reserved, by_state[1]);
    CHECK_EQUAL(stats.readable, by_state[2]);
    CHECK_EQUAL(stats.quarantined, by_state[3]);
    CHECK_EQUAL(stats.evicted, model_.evicted);
    CHECK_EQUAL(stats.mismatches, model_.mismatches);
    CHECK_EQUAL(stats.hits, hits_);
    CHECK_EQUAL(stats.misses, misses_);
    CHECK_EQUAL(stats.refused, refused_);
    CHECK_EQUAL(stats.duplicates, duplicates_);
    CHECK_EQUAL(stats.namespaces, model_.namespaces);
    const auto is_used = [](const auto& item) { return item.id != 0; };
    CHECK_EQUAL(stats.leases, static_cast<std::uint64_t>(std::ranges::count_if(model_.leases, is_used)));
    CHECK_EQUAL(stats.sessions, static_cast<std::uint64_t>(std::ranges::count_if(model_.sessions, is_used)));
    CHECK_EQUAL(stats.tenants.size(), model_.tenants);
    for (std::uint32_t tenant = 0; tenant < model_.tenants; ++tenant) {
        CHECK_EQUAL(stats.tenants[tenant].used_bytes, by_tenant[tenant]);
        CHECK_EQUAL(stats.tenants[tenant].quota_bytes, model_.quotas[tenant]);
    }
    for (const ModelSession& session : model_.sessions) {
        CHECK(session.id == 0 || core_.sessions().held_bytes(session.id) == session.held_bytes);
    }
}

}  // namespace kvo::test

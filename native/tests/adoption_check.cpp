#include "adoption_check.hpp"

#include "arena/span_table.hpp"

namespace kvo::test {
namespace {

constexpr SessionId kNoSessionId = 0;

}  // namespace

AdoptionCheck::AdoptionCheck(CacheCalls& calls, const IndexView& view)
    : calls_(calls), model_(calls.model()), core_(calls.core()), view_(view), spaces_(model_.world.spaces()) {
    for (std::uint32_t chain = 0; chain < model_.world.chains; ++chain) {
        for (std::uint32_t place = 0; place < model_.world.blocks; ++place) {
            places_.emplace(read_hash(hash_of(chain, place).data())[0], std::pair(chain, place));
        }
    }
}

void AdoptionCheck::settle_model(bool is_keeper_alive) {
    model_.evicted = 0;
    model_.mismatches = 0;
    settle_commit();
    settle_abort();
    settle_names();
    settle_leases();
    settle_sessions(is_keeper_alive);
    abort_unknown();
    settle_tables();
    model_.pending = {};
    calls_.check_all();
}

// Entry by entry: committed, or still reserved, whichever shards the index has.
void AdoptionCheck::settle_commit() {
    const Pending& pending = model_.pending;
    for (std::uint32_t i = 0; pending.call == Call::commit && i < pending.count; ++i) {
        const RecordNumber number = pending.records[i];
        ModelRecord& record = model_.records[number];
        const EntryNumber entry = entry_of(record.ticket);
        const std::uint32_t generation = word(entry).generation() - generation_of(record.ticket);
        if (word(entry).state() == EntryState::reserved && generation == 0) {
            record.committed =
                static_cast<std::uint8_t>(Reservation::of(view_.entries[entry].recency.load()).committed);
        } else if (word(entry).is_readable() && generation == 1) {
            CHECK(!model_.is_readable(record.key));
            CHECK_EQUAL(key_of(entry), record.key);
            model_.drop_reservation(record);
            record.state = ModelRecord::State::readable;
            model_.readable[record.key] = static_cast<RecordNumber>(number + 1);
        } else {
            // Another was first, or it was never told to be committed because its session has ended.
            CHECK(word(entry).state() == EntryState::free && generation != 0);
            CHECK(model_.is_readable(record.key) || model_.sessions[record.session].member != Member::keeper);
            model_.drop_reservation(record);
        }
        const std::uint32_t shards = spaces_[model_.space_of(record.key)].geometry.shards;
        for (std::uint32_t shard = 0; shard < shards; ++shard) {
            record.address = address_of(entry);
            record.digests[shard] = record.state == ModelRecord::State::none ? 0 : calls_.digest_of(record, shard);
        }
    }
}

void AdoptionCheck::settle_abort() {
    const Pending& pending = model_.pending;
    for (std::uint32_t i = 0; pending.call == Call::abort && i < pending.count; ++i) {
        ModelRecord& record = model_.records[pending.records[i]];
        const EntryWord now = word(entry_of(record.ticket));
        if (now.state() != EntryState::reserved || now.generation() != generation_of(record.ticket)) {
            model_.drop_reservation(record);
        }
    }
}

// A name that a completed call took away does not come back. Any other name may be gone only if the pending call was to
// take it away.
void AdoptionCheck::settle_names() {
    for (const KeyNumber key : model_.all_keys()) {
        std::uint8_t found = 0;
        const HashBytes hash = model_.hash(key);
        CHECK(core_.search().lookup(spaces_[model_.space_of(key)].space(), hash, std::span(&found, 1)).ok());
        CHECK(found == 0 || model_.is_readable(key));
        if (found == 0 && model_.is_readable(key)) {
            CHECK(may_lose(key));
            model_.take_name(key);
        }
    }
}

bool AdoptionCheck::may_lose(KeyNumber key) const {
    const Pending& pending = model_.pending;
    const ModelRecord& record = model_.records[model_.readable[key] - 1u];
    switch (pending.call) {
        case Call::reserve:
        case Call::reserve_large:
        case Call::evict:
            return record.leases == 0;
        case Call::invalidate:
            return std::ranges::any_of(std::span(pending.keys).first(pending.count),
                                       [key](KeyNumber gone) { return gone == key; });
        case Call::clear:
            return spaces_[model_.space_of(key)].name_space == pending.space;
        default:
            return false;
    }
}

// Every lease of the model is still there and its entries have not moved. At most one lease more is there: that of the
// pending acquire, which was never answered.
void AdoptionCheck::settle_leases() {
    std::map<LeaseId, Lease> listed = read_leases();
    const Pending& pending = model_.pending;
    for (std::size_t i = 0; i < kModelLeases; ++i) {
        ModelLease& lease = model_.leases[i];
        if (lease.id == 0) {
            continue;
        }
        const auto known = listed.find(lease.id);
        if (known == listed.end()) {
            const bool is_ending =
                (pending.call == Call::release && pending.lease == i) ||
                (pending.call == Call::reclaim && model_.sessions[lease.session].member == Member::none);
            CHECK(is_ending);
            model_.drop_lease(lease);
            continue;
        }
        CHECK_EQUAL(known->second.session, model_.sessions[lease.session].id);
        CHECK_EQUAL(known->second.entries.size(), lease.count);
        for (std::uint32_t at = 0; at < lease.count; ++at) {
            const ModelRecord& record = model_.records[lease.records[at]];
            CHECK_EQUAL(key_of(known->second.entries[at]), record.key);
            CHECK_EQUAL(address_of(known->second.entries[at]), record.address);
        }
        listed.erase(known);
    }
    const bool may_lease = pending.call == Call::acquire || pending.call == Call::acquire_entries;
    CHECK(listed.size() <= (may_lease ? 1u : 0u));
    for (const auto& [id, lease] : listed) {
        CHECK_EQUAL(lease.session, model_.sessions[pending.session].id);
        CHECK(core_.leases().release(lease.session, id));
    }
}

// A session with a living process keeps everything; a session without one ends.
void AdoptionCheck::settle_sessions(bool is_keeper_alive) {
    core_.reclaim_ended();
    std::vector<SessionId> unknown;
    for (std::uint16_t place = 0; place < 64; ++place) {
        const SessionId id = core_.sessions().at(place);
        if (id != kNoSessionId && std::ranges::find(model_.sessions, id, &ModelSession::id) == model_.sessions.end()) {
            unknown.push_back(id);
        }
    }
    for (std::size_t place = 0; place < kModelSessions; ++place) {
        ModelSession& session = model_.sessions[place];
        if (session.id == kNoSessionId) {
            continue;
        }
        const bool is_alive = session.member == Member::keeper && is_keeper_alive;
        CHECK_EQUAL(core_.sessions().is_known(session.id), is_alive);
        CHECK(!core_.sessions().is_open(session.id));
        session.is_open = false;
        if (!is_alive) {
            model_.drop_session(place);
        }
    }
    CHECK(unknown.size() <= (model_.pending.call == Call::open_session ? 1u : 0u));
    for (const SessionId id : unknown) {
        model_.sessions[model_.pending.session] = {
            .id = id, .member = Member::keeper, .limit_bytes = view_.sessions[session_place(id)].held_limit_bytes};
    }
}

// Gives back slots that a pending call reserved without being able to answer.
void AdoptionCheck::abort_unknown() {
    std::vector<Ticket> known;
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& record = model_.records[i];
        if (record.state == ModelRecord::State::reserved) {
            const SessionId session = model_.sessions[record.session].id;
            std::uint64_t address = 0;
            CHECK(core_.reservations().locate(session, std::span(&record.ticket, 1), std::span(&address, 1)).ok());
            CHECK_EQUAL(address, record.address);
            known.push_back(record.ticket);
        }
    }
    std::uint32_t unknown = 0;
    for (EntryNumber entry = 0; entry < view_.header->entry_count.load(); ++entry) {
        const Ticket ticket = make_ticket(entry, word(entry).generation());
        if (word(entry).state() == EntryState::reserved && std::ranges::find(known, ticket) == known.end()) {
            const Pending& pending = model_.pending;
            CHECK(pending.call == Call::reserve || pending.call == Call::reserve_large);
            CHECK_EQUAL(core_.reservations().abort(model_.sessions[pending.session].id, std::span(&ticket, 1)), 1u);
            ++unknown;
        }
    }
    CHECK(unknown <= model_.pending.wanted);
}

void AdoptionCheck::settle_tables() {
    const CacheStats stats = core_.stats();
    const bool is_tenant = model_.pending.call == Call::open_tenant;
    CHECK(stats.tenants.size() == model_.tenants || (is_tenant && stats.tenants.size() == model_.tenants + 1));
    model_.tenants = static_cast<std::uint32_t>(stats.tenants.size());
    for (std::uint32_t tenant = 0; is_tenant && tenant < model_.tenants; ++tenant) {
        model_.quotas[tenant] = stats.tenants[tenant].quota_bytes;
    }
    const bool is_namespace = model_.pending.call == Call::open_namespace;
    CHECK(stats.namespaces == model_.namespaces || (is_namespace && stats.namespaces == model_.namespaces + 1));
    model_.namespaces = static_cast<std::uint32_t>(stats.namespaces);
}

std::map<LeaseId, AdoptionCheck::Lease> AdoptionCheck::read_leases() const {
    std::map<LeaseId, Lease> leases;
    for (std::uint32_t number = 0; number < view_.header->lease_node_count.load(); ++number) {
        const LeaseId id = view_.lease_nodes[number].id.load();
        if (id == 0) {
            continue;
        }
        CHECK_EQUAL(static_cast<std::uint32_t>(id), number);
        Lease& lease = leases[id];
        lease.session = view_.lease_nodes[number].session;
        for (std::uint32_t at = number; at != kNoNode; at = view_.lease_nodes[at].next) {
            const LeaseNode& node = view_.lease_nodes[at];
            lease.entries.insert(lease.entries.end(), node.entries.begin(), node.entries.begin() + node.count);
        }
    }
    return leases;
}

KeyNumber AdoptionCheck::key_of(EntryNumber entry) const {
    const auto place = places_.find(view_.entries[entry].hash[0].load());
    CHECK(place != places_.end());
    const Space space = view_.entries[entry].space.load();
    for (std::size_t i = 0; i < kSpaces; ++i) {
        if (spaces_[i].space() == space) {
            const KeyNumber key = model_.key(i, place->second.first, place->second.second);
            const HashWords hash = read_hash(model_.hash(key).data());
            for (std::size_t w = 0; w < hash.size(); ++w) {
                CHECK_EQUAL(view_.entries[entry].hash[w].load(), hash[w]);
            }
            return key;
        }
    }
    fail(__FILE__, __LINE__, "an entry of a space that does not exist");
}

std::uint64_t AdoptionCheck::address_of(EntryNumber entry) const {
    const Slot slot = unpack_slot(view_.entries[entry].slot.load());
    const Space space = view_.entries[entry].space.load();
    for (const SpacePlan& plan : spaces_) {
        if (plan.space() == space) {
            return slot.span * model_.world.extent_bytes + slot.index * slot_bytes_for(plan.geometry.slot_bytes());
        }
    }
    return 0;
}

void AdoptionCheck::check_entries() {
    std::map<EntryNumber, std::uint32_t> leased;
    for (const auto& [id, lease] : read_leases()) {
        for (const EntryNumber entry : lease.entries) {
            ++leased[entry];
        }
    }
    std::map<std::uint64_t, std::uint64_t> slots;  // end by begin
    for (EntryNumber number = 0; number < view_.header->entry_count.load(); ++number) {
        const EntryState state = word(number).state();
        CHECK_EQUAL(word(number).leases(), leased[number]);
        CHECK(state != EntryState::moving);
        if (state == EntryState::free) {
            continue;
        }
        const Space space = view_.entries[number].space.load();
        const auto plan = std::ranges::find_if(spaces_, [&](const SpacePlan& own) { return own.space() == space; });
        CHECK(plan != spaces_.end());
        const std::uint64_t address = address_of(number);
        const std::uint64_t end = address + plan->geometry.slot_bytes();
        const auto next = slots.lower_bound(address);
        CHECK(next == slots.end() || next->first >= end);
        CHECK(next == slots.begin() || std::prev(next)->second <= address);
        slots.emplace(address, end);
        if (state != EntryState::readable) {
            continue;
        }
        const KeyNumber key = key_of(number);
        const HashBytes hash = model_.hash(key);
        CHECK_EQUAL(find_entry(view_, {read_hash(hash.data()), space}).entry, number);
        for (std::uint32_t shard = 0; shard < plan->geometry.shards; ++shard) {
            const std::uint64_t bytes = plan->geometry.record_bytes;
            const auto record = core_.memory().bytes_at(address + shard * bytes, bytes);
            CHECK(record.size() == bytes && has_pattern(record, key, shard));
        }
    }
}

void AdoptionCheck::acquire_all() {
    CHECK(calls_.open_session(std::uint64_t{1} << 40, Member::none, 0));
    std::size_t place = 0;
    while (!model_.sessions[place].is_open) {
        ++place;
    }
    for (std::size_t space = 0; space < kSpaces; ++space) {
        std::vector<KeyNumber> keys;
        const auto acquire = [&] {
            calls_.acquire_entries(place, space, keys, 0);
            for (std::size_t i = 0; i < kModelLeases; ++i) {
                if (model_.leases[i].id != 0 && model_.leases[i].session == place) {
                    calls_.release(i);
                }
            }
            keys.clear();
        };
        for (const KeyNumber key : model_.all_keys()) {
            if (model_.space_of(key) == space && model_.is_readable(key)) {
                keys.push_back(key);
            }
            if (keys.size() == kLeaseItems) {
                acquire();
            }
        }
        acquire();
    }
    calls_.quarantine_session(place);
    calls_.reclaim();
}

void AdoptionCheck::drain() {
    core_.removals().evict(~std::uint64_t{0});
    const CacheStats stats = core_.stats();
    CHECK_EQUAL(stats.readable + stats.reserved + stats.quarantined, 0u);
    CHECK_EQUAL(stats.leases + stats.sessions, 0u);
    CHECK_EQUAL(stats.used_bytes, 0u);
    for (const auto& tenant : stats.tenants) {
        CHECK_EQUAL(tenant.used_bytes, 0u);
    }
    for (std::size_t space = 0; space < kSpaces; ++space) {
        fill(space);
    }
    CHECK_EQUAL(core_.stats().used_bytes, 0u);
}

// Reserves slots until none is free, and checks that they are as many as in a new cache.
void AdoptionCheck::fill(std::size_t space) {
    const World& world = model_.world;
    const SpanShape shape =
        span_shape(slot_bytes_for(spaces_[space].geometry.slot_bytes()), world.extent_bytes, world.segment_bytes);
    const std::uint64_t spans = world.segment_bytes / world.extent_bytes / shape.extents * world.segments;
    const std::uint64_t expected = std::min<std::uint64_t>(spans * shape.slots, world.entry_limit);
    const SessionId session = core_.sessions().open(~std::uint64_t{0}).value();
    std::vector<Ticket> tickets(world.entry_limit + 1);
    const auto reserved = core_.reservations().reserve(session, 0, spaces_[space].space(), {}, tickets);
    CHECK(reserved.ok());
    CHECK_EQUAL(reserved.value(), expected);
    CHECK(core_.sessions().quarantine(session));
    CHECK_EQUAL(core_.reclaim_ended(), 1u);
}

}  // namespace kvo::test

#include "cache_calls.hpp"

namespace kvo::test {

bool CacheCalls::open_session(std::uint64_t limit_bytes, Member member, pid_t process) {
    const auto free = std::ranges::find(model_.sessions, SessionId{0}, &ModelSession::id);
    if (free == model_.sessions.end()) {
        return false;
    }
    model_.pending.session = static_cast<std::uint8_t>(free - model_.sessions.begin());
    const auto id = perform(Call::open_session, [&] {
        auto opened = core_.sessions().open(limit_bytes);
        if (opened.ok() && member != Member::none) {
            auto handle = ProcessHandle::open(identify_process(process).value());
            CHECK(handle.ok());
            CHECK(core_.sessions().add_member(opened.value(), std::move(handle.value())).ok());
        }
        return opened;
    });
    CHECK(id.ok());
    for (const ModelSession& other : model_.sessions) {
        CHECK(other.id != id.value());
    }
    *free = {.id = id.value(), .is_open = true, .member = member, .limit_bytes = limit_bytes};
    settle();
    return true;
}

void CacheCalls::reopen_session(std::size_t place, Member member, pid_t process) {
    ModelSession& session = model_.sessions[place];
    model_.pending.session = static_cast<std::uint8_t>(place);
    const bool is_open = perform(Call::open_session, [&] {
        if (!core_.sessions().reopen(session.id)) {
            return false;
        }
        auto handle = ProcessHandle::open(identify_process(process).value());
        CHECK(handle.ok());
        return core_.sessions().add_member(session.id, std::move(handle.value())).ok();
    });
    CHECK(is_open);
    session.is_open = true;
    session.member = member;
    settle();
}

void CacheCalls::quarantine_session(std::size_t place) {
    model_.pending.session = static_cast<std::uint8_t>(place);
    CHECK(perform(Call::end_session, [&] { return core_.sessions().quarantine(model_.sessions[place].id); }));
    model_.sessions[place].is_open = false;
    settle();
}

// The processes of sessions that have any live as long as this one: only those without end here.
void CacheCalls::reclaim() {
    const std::size_t reclaimed = perform(Call::reclaim, [&] { return core_.reclaim_ended(); });
    std::size_t expected = 0;
    for (std::size_t place = 0; place < kModelSessions; ++place) {
        const ModelSession& session = model_.sessions[place];
        if (session.id != 0 && !session.is_open && session.member == Member::none) {
            model_.drop_session(place);
            ++expected;
        }
    }
    CHECK_EQUAL(reclaimed, expected);
    settle();
}

void CacheCalls::open_tenant(std::uint32_t number, std::uint64_t quota_bytes) {
    const auto tenant =
        perform(Call::open_tenant, [&] { return core_.open_tenant("tenant-" + std::to_string(number), quota_bytes); });
    const bool changes_kind = number < model_.tenants && (model_.quotas[number] == 0) != (quota_bytes == 0);
    CHECK_EQUAL(tenant.ok(), !changes_kind);
    if (tenant.ok()) {
        CHECK_EQUAL(tenant.value(), number);
        model_.quotas[number] = quota_bytes;
        model_.tenants = std::max(model_.tenants, number + 1);
    }
    settle();
}

// Opens a namespace: first those of the world, then others in which nothing is ever stored.
void CacheCalls::open_namespace(std::uint32_t number) {
    const Geometry geometry = model_.world.geometry_of(number < kNamespaces ? number : 0);
    const auto opened =
        perform(Call::open_namespace, [&] { return core_.namespaces().open(fingerprint_of(number), geometry); });
    CHECK(opened.ok());
    CHECK_EQUAL(opened.value(), number);
    model_.namespaces = std::max(model_.namespaces, number + 1);
    settle();
    const Geometry other = model_.world.geometry_of(number == 1 ? 0 : 1);
    CHECK(core_.namespaces().open(fingerprint_of(number), other).fault().code() == Code::invalid);
}

// Calls that break the contract, or come too late: each has its answer, and changes nothing.
void CacheCalls::call_wrongly(std::size_t place) {
    const SessionId session = model_.sessions[place].id;
    for (const ModelLease& lease : model_.leases) {
        if (lease.id != 0) {
            CHECK(lease.session == place || !core_.leases().release(session, lease.id));
            CHECK(!core_.leases().release(model_.sessions[lease.session].id, lease.id + (std::uint64_t{1} << 32)));
        }
    }
    CHECK(!core_.leases().release(session, 0));
    CHECK(!core_.leases().release(session, ~std::uint64_t{0}));
    for (std::uint32_t i = 0; i < model_.record_end; ++i) {
        const ModelRecord& record = model_.records[i];
        const bool is_own = record.state == ModelRecord::State::reserved && record.session == place;
        if (record.ticket != 0 && !is_own) {
            std::uint64_t address = 0;
            CHECK(!core_.reservations().locate(session, std::span(&record.ticket, 1), std::span(&address, 1)).ok());
            CHECK_EQUAL(core_.reservations().abort(session, std::span(&record.ticket, 1)), 0u);
        }
    }
    const HashBytes hash = model_.hash(0);
    std::array<std::uint8_t, 2> found{};
    CHECK(core_.search().lookup(spaces_[0].space(), hash, found).code() == Code::invalid);
    std::array<Ticket, 1> tickets{};
    CHECK(core_.reservations().reserve(session, 0, make_space(7777, 0), hash, tickets).fault().code() == Code::invalid);
    CHECK(core_.reservations().reserve(session, kTenantLimit, spaces_[0].space(), hash, tickets).fault().code() ==
          Code::invalid);
    std::array<CommitOutcome, 1> outcomes{};
    const std::array<std::uint64_t, 1> no_digest{kNoDigest};
    const auto commit = [&](std::uint32_t shard, std::span<const std::uint8_t> hashes,
                            std::span<const std::uint64_t> digests) {
        const CommitBatch batch{.space = spaces_[0].space(),
                                .shard = shard,
                                .tickets = tickets,
                                .hashes = hashes,
                                .parents = {},
                                .digests = digests};
        return core_.commits().commit(session, batch, outcomes).code();
    };
    CHECK(commit(0, hash, no_digest) == Code::invalid);
    CHECK(commit(9, hash, {}) == Code::invalid);
    CHECK(commit(0, {}, {}) == Code::invalid);
    CHECK(commit(0, hash, {}) == Code::ok);
    CHECK(outcomes[0] == CommitOutcome::stale);
    CHECK(!core_.leases().acquire(session, {.name_space = 7777, .chain = hash, .limit = 16}).ok());
    CHECK(!core_.leases().acquire(session, {.name_space = 0, .chain = hash, .limit = 16, .alignment = 0}).ok());
}

}  // namespace kvo::test

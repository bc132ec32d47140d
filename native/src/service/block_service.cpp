#include "service/block_service.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace kvo {

using express::Fields;
using express::Refusal;
using frames::NotPlain;
using frames::PlainReader;
using frames::PlainWriter;

namespace {

constexpr std::size_t kHeadItems = 4;

}  // namespace

BlockService::BlockService(std::shared_ptr<CacheCore> core, const ExpressRights& rights, const ExpressTerms& terms,
                           const std::atomic<bool>& is_draining, StoredLog& log)
    : core_(std::move(core)), rights_(rights), terms_(terms), is_draining_(is_draining), log_(log) {}

bool BlockService::serve(std::span<const std::uint8_t> frame, std::uint64_t now_ns, std::string& out) {
    Call call;
    last_op_ = 0;
    last_refusal_ = 0;
    try {
        PlainReader reader(frame);
        const std::size_t items = reader.array(frames::kArrayItems);
        if (items < kHeadItems) {
            throw NotPlain{};
        }
        call.op = express::at_most(reader.whole(), UINT16_MAX);
        last_op_ = call.op;
        call.number = reader.whole();
        if (call.number == 0) {
            throw NotPlain{};
        }
        call.session = reader.whole();
        call.expires_ns = reader.whole();
        if (call.session != rights_.session) {
            throw Refusal{express::kNoSession, "express: the session is not this channel's"};
        }
        if (call.is_one_way() && call.number != next_one_way_++) {
            throw Refusal{express::kOutOfOrder, "express: one-way messages are not numbered without holes"};
        }
        if (call.expires_ns == 0 || call.expires_ns > now_ns) {
            Fields fields(reader, items - kHeadItems);
            serve_call(call, fields, out);
        }
    } catch (const NotPlain&) {
        write_error(call, {express::kMalformed, "express: the frame is no message of this channel"}, out);
        return call.number != 0;
    } catch (const Refusal& refusal) {
        write_error(call, refusal, out);
        return refusal.code != express::kNoSession && refusal.code != express::kOutOfOrder;
    }
    return true;
}

void BlockService::settle(bool is_sent) {
    if (!is_sent) {
        for (const LeaseId lease : unsettled_leases_) {
            core_->leases().release(rights_.cache_session, lease);
        }
        core_->reservations().abort(rights_.cache_session, unsettled_tickets_);
    }
    unsettled_leases_.clear();
    unsettled_tickets_.clear();
}

void BlockService::serve_call(const Call& call, Fields& fields, std::string& out) {
    switch (call.op) {
        case express::kAcquire:
            return acquire(call, fields, out);
        case express::kAcquireEntries:
            return acquire_entries(call, fields, out);
        case express::kCredits:
            return grant_credits(call, fields, out);
        case express::kPublish:
            return publish(fields);
        case express::kAbort:
            return abort(fields);
        case express::kRelease:
            return release(fields);
        case express::kInvalidate:
            return invalidate(fields);
        case express::kMark:
            fields.end();
            return express::write_frame(out, 3, [&](PlainWriter& writer) {
                writer.whole(express::kDone);
                writer.whole(call.number);
                writer.whole(terms_.boot_id);
            });
        default:
            throw Refusal{express::kUnknownOperation,
                          "op: " + std::to_string(call.op) + ", allowed: known express operations"};
    }
}

void BlockService::read_name_space(Fields& fields) const {
    const std::uint64_t number = fields.whole(UINT32_MAX);
    if (number != rights_.name_space) {
        throw Refusal{express::kNotFound, "namespace " + std::to_string(number) + " is not the session's"};
    }
}

Space BlockService::read_group(Fields& fields) const {
    const auto group = static_cast<std::uint32_t>(fields.whole(UINT16_MAX));
    if (group >= kGroupLimit || core_->namespaces().shards_of(make_space(rights_.name_space, group)) == 0) {
        throw Refusal{express::kNotFound, "there is no group " + std::to_string(group)};
    }
    return make_space(rights_.name_space, group);
}

void BlockService::check_shards(std::span<const std::uint32_t> shards, std::uint32_t count) const {
    for (const std::uint32_t shard : shards) {
        if (shard >= count) {
            throw Refusal{express::kNotFound, "there is no shard " + std::to_string(shard)};
        }
    }
}

void BlockService::check_draining() const {
    if (is_draining_.load(std::memory_order_relaxed)) {
        throw Refusal{express::kDraining, "this server ends, nothing new is taken"};
    }
}

void BlockService::write_error(const Call& call, const Refusal& refusal, std::string& out) {
    last_refusal_ = refusal.code;
    express::write_frame(out, 8, [&](PlainWriter& writer) {
        writer.whole(express::kError);
        writer.whole(call.number);
        writer.whole(terms_.boot_id);
        writer.whole(refusal.code);
        writer.text(refusal.line);
        writer.truth(refusal.code == express::kInternal);
        writer.whole(0);
        writer.whole(call.op);
    });
}

using express::Fields;
using express::Refusal;
using frames::NotPlain;
using frames::PlainWriter;

namespace {

constexpr std::size_t kAcquiredBytes = 64;
constexpr std::size_t kLeasedSlotsBytes = 32;  // of the items around an answer's blobs, at most

}  // namespace

void BlockService::acquire(const Call& call, Fields& fields, std::string& out) {
    fields.take(2);
    BoundaryQuery query;
    read_name_space(fields);
    query.name_space = rights_.name_space;
    query.chain = fields.blob(kHashBytes, terms_.blocks);
    query.local = fields.next() ? fields.whole() : 0;
    query.limit = fields.next() ? fields.whole() : UINT64_MAX;
    query.alignment = fields.next() ? fields.whole(UINT32_MAX) : 1;
    const std::vector<std::uint32_t> shards =
        fields.next() ? fields.shards(terms_.shards) : std::vector<std::uint32_t>();
    fields.end();
    if (query.alignment == 0) {
        throw NotPlain{};
    }
    std::uint32_t most = 0;
    for (std::uint32_t group = 0; group < kGroupLimit; ++group) {
        most = std::max(most, core_->namespaces().shards_of(make_space(rights_.name_space, group)));
    }
    check_shards(shards, most);
    check_draining();
    answer_acquire(call, core_->leases().acquire(rights_.cache_session, query, shards), shards.size(), kGroupLimit,
                   out);
}

void BlockService::acquire_entries(const Call& call, Fields& fields, std::string& out) {
    fields.take(3);
    read_name_space(fields);
    const Space space = read_group(fields);
    const std::span<const std::uint8_t> hashes = fields.blob(kHashBytes, terms_.blocks);
    const std::vector<std::uint32_t> shards =
        fields.next() ? fields.shards(terms_.shards) : std::vector<std::uint32_t>();
    fields.end();
    check_shards(shards, core_->namespaces().shards_of(space));
    check_draining();
    answer_acquire(call, core_->leases().acquire_entries(rights_.cache_session, space, hashes, shards), shards.size(),
                   group_of(space), out);
}

void BlockService::release(Fields& fields) {
    fields.take(1);
    const std::vector<LeaseId> leases = fields.numbers(terms_.leases);
    fields.end();
    for (const LeaseId lease : leases) {
        core_->leases().release(rights_.cache_session, lease);
    }
}

void BlockService::invalidate(Fields& fields) {
    fields.take(3);
    read_name_space(fields);
    const Space space = read_group(fields);
    const std::span<const std::uint8_t> hashes = fields.blob(kHashBytes, terms_.batch);
    fields.end();
    // The one call that names no session to the core.
    if (core_->sessions().is_open(rights_.cache_session)) {
        core_->removals().invalidate(space, hashes);
        log_.add({.owner = rights_.owner,
                  .group = group_of(space),
                  .hashes = {hashes.begin(), hashes.end()},
                  .parents = {},
                  .is_forgotten = true});
    }
}

// `only`: the one group that is told of; kGroupLimit: all are.
void BlockService::answer_acquire(const Call& call, const Result<Acquired>& asked, std::size_t shards, std::size_t only,
                                  std::string& out) {
    if (!asked.ok()) {
        throw Refusal{express::kInternal, asked.fault().message()};
    }
    const Acquired& found = asked.value();
    if (found.lease != 0) {
        unsettled_leases_.push_back(found.lease);
    }
    std::size_t blocks = 0;
    for (const LeasedGroup& group : found.groups) {
        blocks += group.addresses.size();
    }
    const std::size_t size =
        kAcquiredBytes + found.groups.size() * kLeasedSlotsBytes + blocks * sizeof(std::uint64_t) * (1 + shards);
    if (size > terms_.frame_bytes) {
        core_->leases().release(rights_.cache_session, found.lease);
        throw Refusal{express::kTooLarge, "the answer has " + std::to_string(size) + " bytes, allowed are " +
                                              std::to_string(terms_.frame_bytes) + ": ask for fewer blocks or shards"};
    }
    const bool is_one = only < found.groups.size();
    express::write_frame(out, 8, [&](PlainWriter& writer) {
        writer.whole(express::kAcquired);
        writer.whole(call.number);
        writer.whole(terms_.boot_id);
        writer.whole(static_cast<std::uint64_t>(found.outcome));
        writer.whole(found.boundary);
        writer.whole(found.lease);
        writer.array(is_one ? 1 : found.groups.size());
        for (std::size_t group = is_one ? only : 0; group < (is_one ? only + 1 : found.groups.size()); ++group) {
            writer.array(3);
            writer.whole(found.groups[group].first);
            writer.blob(express::bytes_of(found.groups[group].addresses));
            writer.blob(express::bytes_of(found.groups[group].digests));
        }
        writer.whole(0);
    });
}

using express::Fields;
using express::Refusal;
using frames::NotPlain;
using frames::PlainWriter;

void BlockService::grant_credits(const Call& call, Fields& fields, std::string& out) {
    fields.take(2);
    read_name_space(fields);
    const Space space = read_group(fields);
    const std::uint64_t count = fields.next() ? fields.whole(terms_.batch) : 0;
    const std::span<const std::uint8_t> hashes =
        fields.next() ? fields.blob(kHashBytes, terms_.batch) : std::span<const std::uint8_t>();
    fields.end();
    check_draining();
    if (count != 0 && !hashes.empty()) {
        throw Refusal{express::kMalformed, "count and hashes at once"};
    }
    std::vector<Ticket> tickets(hashes.empty() ? static_cast<std::size_t>(count) : hashes.size() / kHashBytes);
    const Result<std::size_t> decided =
        core_->reservations().reserve(rights_.cache_session, rights_.tenant, space, hashes, tickets);
    tickets.resize(decided.ok() ? decided.value() : 0);
    std::vector<std::uint64_t> addresses(tickets.size());
    const Status located = core_->reservations().locate(rights_.cache_session, tickets, addresses);
    if (!decided.ok() || !located.ok()) {
        core_->reservations().abort(rights_.cache_session, tickets);
        throw Refusal{express::kInternal, decided.ok() ? located.message() : decided.fault().message()};
    }
    std::ranges::copy_if(tickets, std::back_inserter(unsettled_tickets_), [](Ticket ticket) { return ticket != 0; });
    express::write_frame(out, 6, [&](PlainWriter& writer) {
        writer.whole(express::kCreditsGranted);
        writer.whole(call.number);
        writer.whole(terms_.boot_id);
        writer.blob(express::bytes_of(tickets));
        writer.blob(express::bytes_of(addresses));
        writer.whole(0);
    });
}

void BlockService::publish(Fields& fields) {
    fields.take(5);
    read_name_space(fields);
    const Space space = read_group(fields);
    const auto shard = static_cast<std::uint32_t>(fields.whole(UINT16_MAX));
    const std::vector<Ticket> tickets = fields.numbers(terms_.batch);
    const std::span<const std::uint8_t> hashes = fields.blob(kHashBytes, terms_.batch);
    const std::span<const std::uint8_t> parents =
        fields.next() ? fields.blob(kHashBytes, terms_.batch) : std::span<const std::uint8_t>();
    const std::vector<std::uint64_t> digests =
        fields.next() ? fields.numbers(terms_.batch) : std::vector<std::uint64_t>();
    const std::uint64_t tenant = fields.next() ? fields.whole(UINT16_MAX) : 0;
    const std::uint64_t shards = 1 + (fields.next() ? fields.whole(UINT16_MAX) : 0);
    fields.end();
    const std::size_t records = tickets.size();
    const bool is_even = hashes.size() == records * kHashBytes &&
                         (parents.empty() || parents.size() == hashes.size()) &&
                         (digests.empty() || digests.size() == records * shards);
    if (!is_even) {
        throw NotPlain{};
    }
    const auto last_shard = static_cast<std::uint32_t>(shard + shards - 1);
    check_shards(std::span(&last_shard, 1), core_->namespaces().shards_of(space));
    if (std::ranges::find(digests, 0) != digests.end()) {
        throw Refusal{express::kMalformed, "0 is no record's digest"};
    }
    std::vector<CommitOutcome> outcomes(records);
    CommitBatch batch{
        .space = space, .shard = shard, .tickets = tickets, .hashes = hashes, .parents = parents, .digests = {}};
    if (tenant != 0 && tenant <= rights_.tenants.size()) {
        batch.tenant = rights_.tenants[tenant - 1];
    }
    for (; batch.shard <= last_shard; ++batch.shard) {
        if (!digests.empty()) {
            batch.digests = std::span(digests).subspan((batch.shard - shard) * records, records);
        }
        const Status committed = core_->commits().commit(rights_.cache_session, batch, outcomes);
        if (!committed.ok()) {
            throw Refusal{express::kInternal, committed.message()};
        }
        log_stored(space, outcomes, hashes, parents);
    }
}

void BlockService::log_stored(Space space, std::span<const CommitOutcome> outcomes,
                              std::span<const std::uint8_t> hashes, std::span<const std::uint8_t> parents) {
    if (!log_.is_wanted() || std::ranges::find(outcomes, CommitOutcome::readable) == outcomes.end()) {
        return;
    }
    StoredBlocks stored{
        .owner = rights_.owner, .group = group_of(space), .hashes = {}, .parents = {}, .is_forgotten = false};
    for (std::size_t item = 0; item < outcomes.size(); ++item) {
        if (outcomes[item] == CommitOutcome::readable) {
            const std::size_t at = item * kHashBytes;
            stored.hashes.insert(stored.hashes.end(), hashes.begin() + at, hashes.begin() + at + kHashBytes);
            if (!parents.empty()) {
                stored.parents.insert(stored.parents.end(), parents.begin() + at, parents.begin() + at + kHashBytes);
            }
        }
    }
    log_.add(std::move(stored));
}

void BlockService::abort(Fields& fields) {
    fields.take(1);
    const std::vector<Ticket> tickets = fields.numbers(terms_.batch);
    fields.end();
    core_->reservations().abort(rights_.cache_session, tickets);
}

}  // namespace kvo

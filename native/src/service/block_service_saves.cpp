#include <algorithm>
#include <iterator>
#include <utility>

#include "service/block_service.hpp"

namespace kvo {

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

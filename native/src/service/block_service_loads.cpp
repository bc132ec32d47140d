#include <algorithm>

#include "service/block_service.hpp"

namespace kvo {

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

}  // namespace kvo

#include "service/block_service.hpp"

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

}  // namespace kvo

// Serves one process over its express channel: frames in, frames out. Knows no socket and no thread.
//
//     acquire, acquire_entries, credits, mark ──► one answer      publish, abort, release, invalidate ──► none
//
// The frames are those of the control channel, each behind its length in 4 bytes, little-endian.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cache/cache_core.hpp"
#include "service/express_messages.hpp"
#include "service/stored_log.hpp"

namespace kvo {

// Numbers and limits of the protocol, the same for all channels.
struct ExpressTerms {
    std::uint64_t boot_id = 0;
    std::size_t frame_bytes = 0;  // of a frame at most, likewise below
    std::size_t blocks = 0;
    std::size_t batch = 0;
    std::size_t leases = 0;
    std::size_t shards = 0;
};

// The session and user that a channel belongs to, and the blocks that its calls may name.
struct ExpressRights {
    std::uint64_t session = 0;  // that calls name
    SessionId cache_session = 0;
    std::uint32_t name_space = 0;
    TenantNumber tenant = 0;
    std::vector<TenantNumber> tenants = {};  // that a publish may name, by their places
    std::uint64_t owner = 0;                 // in the log of what is stored
    std::string user = {};                   // whose share of the memory for long messages it uses
};

// Belongs to one thread.
class BlockService {
public:
    // `is_draining`: nothing new is taken. It and `log` outlive the service.
    BlockService(std::shared_ptr<CacheCore> core, const ExpressRights& rights, const ExpressTerms& terms,
                 const std::atomic<bool>& is_draining, StoredLog& log);

    // Appends the answer, if there is one, to `out`. False: the process that sent the frame is served no more.
    bool serve(std::span<const std::uint8_t> frame, std::uint64_t now_ns, std::string& out);

    // The op of the call that was served last; 0: the frame was no call.
    std::uint64_t last_op() const { return last_op_; }

    // Why that call was refused, an error's code; 0: it was not.
    std::uint64_t last_refusal() const { return last_refusal_; }

    // Settles the last answer. `is_sent`: the process has it, as far as is known here. Otherwise the leases and slots
    // that it grants are given back.
    void settle(bool is_sent);

private:
    struct Call {
        std::uint64_t op = 0;
        std::uint64_t number = 0;
        std::uint64_t session = 0;
        std::uint64_t expires_ns = 0;

        bool is_one_way() const { return op >= 32 && op < 48; }
    };

    void serve_call(const Call& call, express::Fields& fields, std::string& out);
    void acquire(const Call& call, express::Fields& fields, std::string& out);
    void acquire_entries(const Call& call, express::Fields& fields, std::string& out);
    void grant_credits(const Call& call, express::Fields& fields, std::string& out);
    void publish(express::Fields& fields);
    void log_stored(Space space, std::span<const CommitOutcome> outcomes, std::span<const std::uint8_t> hashes,
                    std::span<const std::uint8_t> parents);
    void abort(express::Fields& fields);
    void release(express::Fields& fields);
    void invalidate(express::Fields& fields);

    void read_name_space(express::Fields& fields) const;
    Space read_group(express::Fields& fields) const;
    void check_shards(std::span<const std::uint32_t> shards, std::uint32_t count) const;
    void check_draining() const;

    void answer_acquire(const Call& call, const Result<Acquired>& asked, std::size_t shards, std::size_t only,
                        std::string& out);
    void write_error(const Call& call, const express::Refusal& refusal, std::string& out);

    const std::shared_ptr<CacheCore> core_;
    const ExpressRights rights_;
    const ExpressTerms terms_;
    const std::atomic<bool>& is_draining_;
    StoredLog& log_;
    std::uint64_t next_one_way_ = 1;
    std::uint64_t last_op_ = 0;
    std::uint64_t last_refusal_ = 0;
    std::vector<LeaseId> unsettled_leases_;
    std::vector<Ticket> unsettled_tickets_;
};

}  // namespace kvo

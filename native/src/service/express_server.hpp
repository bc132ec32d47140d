// Express channels of a server: one thread for each, which waits for calls and serves them, without Python.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "cache/cache_core.hpp"
#include "service/block_service.hpp"
#include "service/byte_shares.hpp"
#include "service/express_messages.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo {

// How long calls took on the server, by what was called.
//
// Written and read by any threads.
class CallTimes {
public:
    static constexpr std::array<std::uint64_t, 11> kBoundsNs = {
        1'000, 3'000, 10'000, 30'000, 100'000, 300'000, 1'000'000, 3'000'000, 10'000'000, 100'000'000, 1'000'000'000};

    struct Row {
        std::string_view name;
        std::uint64_t op = 0;
        std::array<std::atomic<std::uint64_t>, kBoundsNs.size() + 1> counts = {};  // the last: longer than all bounds
        std::atomic<std::uint64_t> sum_ns = 0;
    };

    void add(std::uint64_t op, std::uint64_t took_ns) {
        const auto row = std::ranges::find(rows_, op, &Row::op);
        if (row == rows_.end()) {
            return;
        }
        const auto bucket = std::ranges::lower_bound(kBoundsNs, took_ns) - kBoundsNs.begin();
        row->counts[static_cast<std::size_t>(bucket)].fetch_add(1, std::memory_order_relaxed);
        row->sum_ns.fetch_add(took_ns, std::memory_order_relaxed);
    }

    const auto& rows() const { return rows_; }

private:
    std::array<Row, 7> rows_ = {{{"acquire", express::kAcquire},
                                 {"acquire_entries", express::kAcquireEntries},
                                 {"credits", express::kCredits},
                                 {"publish", express::kPublish},
                                 {"abort", express::kAbort},
                                 {"release", express::kRelease},
                                 {"invalidate", express::kInvalidate}}};
};

// How many calls the server refused, by why.
//
// Written and read by any threads.
class RefusalCounts {
public:
    static constexpr std::size_t kCodes = 32;  // of the protocol, with room for more

    void add(std::uint64_t code) {
        if (code < kCodes) {
            counts_[code].fetch_add(1, std::memory_order_relaxed);
        }
    }

    std::uint64_t of(std::uint64_t code) const { return counts_[code].load(std::memory_order_relaxed); }

private:
    std::array<std::atomic<std::uint64_t>, kCodes> counts_ = {};
};

// Safe to call from any thread of a program without Python; its bindings, from one.
class ExpressServer {
public:
    // `channel_limit`: number of channels at a time. `log_limit`: number of blocks in the log of stored blocks.
    // `message_bytes`: memory for long messages of all channels; a channel that takes more than its user's share is
    // ended.
    ExpressServer(const ExpressTerms& terms, std::size_t channel_limit, std::size_t log_limit,
                  std::uint64_t message_bytes);
    // Like `close`.
    ~ExpressServer();
    ExpressServer(const ExpressServer&) = delete;
    ExpressServer& operator=(const ExpressServer&) = delete;

    // Serves the other end of this stream socket, which waits where it is read, from here on, and keeps the core for as
    // long. Returns the channel's number, or 0 if there are too many or no thread can be started. What is refused on it
    // is counted for the domain with this number.
    std::uint64_t open(FileDescriptor end, std::shared_ptr<CacheCore> core, const ExpressRights& rights,
                       std::uint64_t domain = 0);

    // No call is begun on it any more. One that is being served goes on; a session that is not open gets nothing.
    void end(std::uint64_t channel);

    StoredLog& log() { return log_; }
    const CallTimes& times() const { return times_; }
    // How many calls of a domain got an error with this code for an answer.
    std::uint64_t count_refusals(std::uint64_t domain, std::uint64_t code) const;

    // Nothing new is taken; releases are still served.
    void start_drain() { is_draining_.store(true, std::memory_order_relaxed); }

    // Lets go of channels that have ended, with their sockets and cores. To be called now and then.
    void tick();

    // Ends all, and waits for what is being served.
    void close();

private:
    struct Channel {
        Channel(FileDescriptor opened, std::shared_ptr<CacheCore> core, const ExpressRights& rights,
                const ExpressTerms& terms, const std::atomic<bool>& is_draining, StoredLog& log, CallTimes& call_times,
                RefusalCounts& refusal_counts, ByteShares& messages)
            : end(std::move(opened)),
              frame_bytes(terms.frame_bytes),
              times(call_times),
              refusals(refusal_counts),
              held(messages, rights.user),
              service(std::move(core), rights, terms, is_draining, log) {}

        FileDescriptor end;
        const std::size_t frame_bytes;
        CallTimes& times;
        RefusalCounts& refusals;
        ByteShare held;  // of its thread, and what it holds of messages
        BlockService service;
        std::uint64_t number = 0;
        std::atomic<bool> is_ended = false;  // nothing more is begun
        std::atomic<bool> is_over = false;   // the thread has nothing left to do
        std::thread thread;
    };

    static void run(Channel& channel);
    static void serve(Channel& channel);
    static void stop(Channel& channel);
    void reap();

    const ExpressTerms terms_;
    const std::size_t channel_limit_;
    std::atomic<bool> is_draining_ = false;
    StoredLog log_;
    CallTimes times_;
    ByteShares messages_;
    mutable std::mutex mutex_;                         // guards what follows
    std::map<std::uint64_t, RefusalCounts> refusals_;  // by domain; channels add to them without the mutex
    std::list<Channel> channels_;
    std::uint64_t last_ = 0;
};

}  // namespace kvo

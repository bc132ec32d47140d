// A host engine whose threads a test holds before a piece, and lets go.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "copy/host_engine.hpp"
#include "copy_contract.hpp"

namespace kvo::test {

// Lets threads into a copy only when told.
class Gate {
public:
    void hold(CopyTicket ticket) {
        const std::lock_guard hold(lock_);
        held_.insert(ticket);
    }
    void let_go() {
        const std::lock_guard hold(lock_);
        held_.clear();
        changed_.notify_all();
    }
    void enter(CopyTicket ticket) {
        std::unique_lock hold(lock_);
        entered_.insert(ticket);
        changed_.notify_all();
        changed_.wait_for(hold, std::chrono::milliseconds(kCopyTimeoutMs), [&] { return !held_.contains(ticket); });
    }
    void await(CopyTicket ticket) {
        std::unique_lock hold(lock_);
        CHECK(changed_.wait_for(hold, std::chrono::milliseconds(kCopyTimeoutMs),
                                [&] { return entered_.contains(ticket); }));
    }
    bool has_entered(CopyTicket ticket) {
        const std::lock_guard hold(lock_);
        return entered_.contains(ticket);
    }

private:
    std::mutex lock_;
    std::condition_variable changed_;
    std::set<CopyTicket> held_, entered_;
};

// Four blocks of 4096 bytes, four slots, and an engine that a gate holds.
struct GatedEngine {
    explicit GatedEngine(unsigned threads, std::uint64_t piece_bytes = 1 << 20) {
        PageTable table{.block_count = 4,
                        .groups = {{.record_bytes = 4096, .runs = {{address(pages), 4096, 4096, 0}}}}};
        HostEngineTerms terms{.threads = threads, .piece_bytes = piece_bytes};
        terms.before_piece = [this](CopyTicket ticket) { gate.enter(ticket); };
        engine = std::move(HostEngine::create(std::move(table), std::move(terms)).value());
    }
    static std::uint64_t address(const CopyBytes& bytes) { return reinterpret_cast<std::uint64_t>(bytes.data()); }

    CopyTicket submit(CopyDirection direction, std::uint32_t block, std::size_t slot) const {
        return engine->submit({direction, false, {{0, block, address(slots) + 4096 * slot}}}, {}).value();
    }

    CopyBytes pages = CopyBytes(4 * 4096, 1), slots = CopyBytes(4 * 4096, 2);
    Gate gate;
    std::unique_ptr<HostEngine> engine;  // ends first
};

}  // namespace kvo::test

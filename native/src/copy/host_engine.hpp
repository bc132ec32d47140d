// The copy engine of machines whose model runs on the processor: a few threads, and all memory in reach of each.
//
// A plan is queued as it is; the threads sort it, cut it into pieces of about a megabyte and copy these, several at
// once of a large plan. Plans that share bytes which one of them writes run as if one after the other, in the order of
// submission; others run at the same time (copy_schedule.hpp). Blocks of different numbers share no byte.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "base/status.hpp"
#include "copy/copy_engine.hpp"
#include "copy/copy_plan.hpp"

namespace kvo {

struct HostEngineTerms {
    unsigned threads = 0;  // 0: one for two processors that the caller may use, at most 8
    CopyLimits limits = {};
    std::uint64_t piece_bytes = std::uint64_t{1} << 20;

    // Called by a thread before it sorts a plan, and before it copies a piece: tests hold it here, or throw
    // std::bad_alloc.
    std::function<void(CopyTicket)> before_prepare = {};
    std::function<void(CopyTicket)> before_piece = {};
};

// After a fork the engine is the parent's. In the child, submit says so (Code::unavailable), poll has nothing, fence is
// false, and closing does nothing.
class HostEngine final : public CopyEngine {
public:
    // Starts the threads, where there are several NUMA nodes on those that have pages. The threads have the caller's
    // processors, so a caller that is bound to one of them has them compete for it. Code::invalid: the pages or terms
    // are wrong. Code::failed: not one thread can be had; fewer than asked for are taken as they are.
    static Result<std::unique_ptr<HostEngine>> create(PageTable pages, HostEngineTerms terms);

    // Waits for the pieces that are being copied, without a bound: it is `close` that has one.
    ~HostEngine() override;
    HostEngine(const HostEngine&) = delete;
    HostEngine& operator=(const HostEngine&) = delete;

    Result<CopyTicket> submit(CopyPlan plan, std::optional<ComputeStream> after) override;
    std::vector<FinishedCopy> poll() override;
    bool fence(int timeout_ms) override;

    // Plans that have not begun fail. Running ones have until the timeout to end, and stop at their next piece after
    // it. May be called from several threads, and again after it failed; a plan that is submitted meanwhile is refused
    // or ends.
    Status close(int timeout_ms) override;

    unsigned thread_count() const noexcept;

private:
    class Core;
    explicit HostEngine(std::unique_ptr<Core> core);

    std::unique_ptr<Core> core_;
};

}  // namespace kvo

// Copies blocks without blocking the caller. One interface, one file per kind: host, cuda.
//
//     submit ──► ticket ──► ... copies ... ──► poll: finished, with digests or with what failed
//
// A plan that fails fails alone. After `close` no engine touches any memory any more, or it says that it still might.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "copy/copy_plan.hpp"
#include "digest/digest.hpp"

namespace kvo {

using CopyTicket = std::uint64_t;  // counts from 1

// A stream of the engine's compute, by the driver's own handle, of which 0 is one.
using ComputeStream = std::uint64_t;

struct FinishedCopy {
    CopyTicket ticket = 0;
    Status status;                   // not ok: some bytes may have been written, none beyond the plan's own
    std::vector<RunDigest> digests;  // by item, if the plan wanted them and all went well
    // From when its first byte could move to when its last one had, without what it waited for: plans in front of it,
    // and what came before on its stream. 0: nothing moved.
    std::chrono::nanoseconds copied{0};
};

struct CopyLimits {
    std::size_t plans = 1024;  // submitted and not yet polled; beyond it submit refuses
};

// Everything may be called from any thread.
class CopyEngine {
public:
    virtual ~CopyEngine() = default;

    // Checks the plan and queues it; takes tens of microseconds for thousands of items and waits for nothing. What
    // `after` has been given before comes before the copies; the host engine's caller has its memory ready. The memory
    // that the plan names stays valid until its ticket is polled. Code::invalid: the plan is wrong. Code::unavailable:
    // the queue is full, or the engine is lost.
    virtual Result<CopyTicket> submit(CopyPlan plan, std::optional<ComputeStream> after) = 0;

    // Plans that have ended since the last call, each told once. Never blocks.
    virtual std::vector<FinishedCopy> poll() = 0;

    // Waits until every plan submitted before has ended, or for `timeout_ms`; false: not all have.
    virtual bool fence(int timeout_ms) = 0;

    // Ends what is queued and waits for what runs, for at most `timeout_ms`. Code::failed: something still runs, and
    // the memory it was given must stay.
    virtual Status close(int timeout_ms) = 0;
};

}  // namespace kvo

// Plans that share bytes, one of them writing, run one after the other, in the order of their submission.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "copy/copy_engine.hpp"
#include "copy/copy_plan.hpp"
#include "copy/copy_schedule.hpp"

namespace kvo {

// Safe to call from any thread, but not by two at once for the same ticket. No lock is held while plans are compared.
class CopyOrder {
public:
    // Adds a plan; plans are added in the order of their tickets. Throws std::bad_alloc, and adds nothing then.
    void add(CopyTicket ticket, std::shared_ptr<const CopyPlan> plan);
    // Whether no earlier plan that has not ended stands in this one's way. The first time it costs a comparison with
    // each of them. Throws std::bad_alloc; ask again.
    bool may_begin(CopyTicket ticket, const PageTable& pages);
    void end(CopyTicket ticket) noexcept;

private:
    struct Entry {
        std::shared_ptr<const CopyPlan> plan;
        std::once_flag is_measured;
        CopyFootprint footprint;
        std::optional<std::vector<CopyTicket>> waits_for;  // once asked for
    };

    static const CopyFootprint& measure(Entry& entry, const PageTable& pages);
    std::vector<CopyTicket> find_earlier(CopyTicket ticket, Entry& self, const PageTable& pages);

    std::mutex mutex_;
    std::map<CopyTicket, std::shared_ptr<Entry>> entries_;
};

}  // namespace kvo

#include "copy/copy_order.hpp"

namespace kvo {

void CopyOrder::add(CopyTicket ticket, std::shared_ptr<const CopyPlan> plan) {
    auto entry = std::make_shared<Entry>();
    entry->plan = std::move(plan);
    const std::lock_guard lock(mutex_);
    entries_.emplace(ticket, std::move(entry));
}

bool CopyOrder::may_begin(CopyTicket ticket, const PageTable& pages) {
    std::unique_lock lock(mutex_);
    const std::shared_ptr<Entry> self = entries_.at(ticket);
    if (!self->waits_for) {
        lock.unlock();
        std::vector<CopyTicket> waits_for = find_earlier(ticket, *self, pages);
        lock.lock();
        self->waits_for = std::move(waits_for);
    }
    std::erase_if(*self->waits_for, [this](CopyTicket earlier) { return !entries_.contains(earlier); });
    return self->waits_for->empty();
}

void CopyOrder::end(CopyTicket ticket) noexcept {
    const std::lock_guard lock(mutex_);
    entries_.erase(ticket);
}

std::vector<CopyTicket> CopyOrder::find_earlier(CopyTicket ticket, Entry& self, const PageTable& pages) {
    std::vector<std::pair<CopyTicket, std::shared_ptr<Entry>>> earlier;
    {
        const std::lock_guard lock(mutex_);
        earlier.assign(entries_.begin(), entries_.find(ticket));
    }
    std::vector<CopyTicket> found;
    for (const auto& [number, entry] : earlier) {
        if (have_order(measure(*entry, pages), measure(self, pages))) {
            found.push_back(number);
        }
    }
    return found;
}

const CopyFootprint& CopyOrder::measure(Entry& entry, const PageTable& pages) {
    std::call_once(entry.is_measured, [&] { entry.footprint = make_footprint(*entry.plan, pages); });
    return entry.footprint;
}

}  // namespace kvo

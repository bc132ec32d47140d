#include "copy/copy_tickets.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

namespace kvo {

Result<CopyTicket> CopyTickets::open() {
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= limit_) {
        return Status(Code::unavailable,
                      "all " + std::to_string(limit_) + " plans that may be under way are; poll to make room");
    }
    entries_.try_emplace(last_ + 1);
    return ++last_;
}

void CopyTickets::forget(CopyTicket ticket) noexcept {
    const std::lock_guard lock(mutex_);
    entries_.erase(ticket);
    changed_.notify_all();
}

void CopyTickets::give_to_device(CopyTicket ticket, SharedEvent done) noexcept {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_.find(ticket)->second;
    entry.is_with_device = true;
    entry.done = std::move(done);
    changed_.notify_all();
}

void CopyTickets::finish(CopyTicket ticket, Status status, std::vector<RunDigest> digests,
                         std::chrono::nanoseconds copied) noexcept {
    const std::lock_guard lock(mutex_);
    Entry& entry = entries_.find(ticket)->second;
    entry.is_finished = true;
    entry.status = std::move(status);
    entry.digests = std::move(digests);
    entry.copied = copied;
    ++finished_count_;
    changed_.notify_all();
}

void CopyTickets::release_events() noexcept {
    const std::lock_guard lock(mutex_);
    for (auto& [ticket, entry] : entries_) {
        entry.done.reset();
    }
}

std::vector<FinishedCopy> CopyTickets::take_finished() {
    std::vector<FinishedCopy> finished;
    const std::lock_guard lock(mutex_);
    finished.reserve(finished_count_);
    for (auto next = entries_.begin(); finished.size() < finished_count_;) {
        const auto entry = next++;
        if (entry->second.is_finished) {
            finished.push_back({entry->first, std::move(entry->second.status), std::move(entry->second.digests),
                                entry->second.copied});
            entries_.erase(entry);
        }
    }
    finished_count_ = 0;
    return finished;
}

bool CopyTickets::wait_until_finished(int timeout_ms) {
    std::unique_lock lock(mutex_);
    const CopyTicket last = last_;
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] {
        return finished_count_ == entries_.size() || std::ranges::all_of(entries_, [last](const auto& entry) {
                   return entry.first > last || entry.second.is_finished;
               });
    });
}

Result<SharedEvent> CopyTickets::wait_for_event(CopyTicket ticket, int timeout_ms) {
    std::unique_lock lock(mutex_);
    if (ticket == 0 || ticket > last_) {
        return Status(Code::invalid, "there is no ticket " + std::to_string(ticket));
    }
    const auto is_known = [&] {
        const auto at = entries_.find(ticket);
        return at == entries_.end() || at->second.is_with_device || at->second.is_finished;
    };
    if (!changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), is_known)) {
        return Status(Code::unavailable, "the plan still waits for plans in front of it");
    }
    const auto at = entries_.find(ticket);
    if (at == entries_.end()) {
        // The caller that took the result knows how the plan ended. The result is not kept, so no other caller can
        // learn it.
        return Status(Code::invalid, "ticket " + std::to_string(ticket) + " has been told");
    }
    return at->second.status.ok() ? Result<SharedEvent>(at->second.done) : Result<SharedEvent>(at->second.status);
}

}  // namespace kvo

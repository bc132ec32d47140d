#include "copy/copy_schedule.hpp"

#include <algorithm>
#include <utility>

namespace kvo {
namespace {

bool share_block(const CopyFootprint& a, const CopyFootprint& b) noexcept {
    auto left = a.blocks.begin();
    auto right = b.blocks.begin();
    while (left != a.blocks.end() && right != b.blocks.end()) {
        if (*left == *right) {
            return true;
        }
        *left < *right ? static_cast<void>(++left) : static_cast<void>(++right);
    }
    return false;
}

// Both sides' ranges in the order of their begins: one that begins before the other side's furthest end is inside it.
bool share_slot(const CopyFootprint& a, const CopyFootprint& b) noexcept {
    auto left = a.slots.begin();
    auto right = b.slots.begin();
    std::uint64_t left_end = 0;
    std::uint64_t right_end = 0;
    while (left != a.slots.end() || right != b.slots.end()) {
        const bool is_left = right == b.slots.end() || (left != a.slots.end() && left->begin < right->begin);
        const CopyFootprint::Range& range = is_left ? *left++ : *right++;
        std::uint64_t& own_end = is_left ? left_end : right_end;
        if (range.begin < (is_left ? right_end : left_end) && range.begin < range.end) {
            return true;
        }
        own_end = std::max(own_end, range.end);
    }
    return false;
}

CopyDirection other(CopyDirection direction) noexcept {
    return direction == CopyDirection::save ? CopyDirection::load : CopyDirection::save;
}

}  // namespace

CopyFootprint make_footprint(const CopyPlan& plan, const PageTable& pages) {
    CopyFootprint footprint{.direction = plan.direction, .blocks = {}, .slots = {}};
    footprint.blocks.reserve(plan.items.size());
    footprint.slots.reserve(plan.items.size());
    for (const CopyItem& item : plan.items) {
        footprint.blocks.push_back(item.block);
        footprint.slots.push_back({item.slot, item.slot + pages.groups[item.group].record_bytes});
    }
    std::ranges::sort(footprint.blocks);
    std::ranges::sort(footprint.slots, {}, &CopyFootprint::Range::begin);
    return footprint;
}

bool have_order(const CopyFootprint& a, const CopyFootprint& b) noexcept {
    const bool is_block_written = a.direction == CopyDirection::load || b.direction == CopyDirection::load;
    const bool is_slot_written = a.direction == CopyDirection::save || b.direction == CopyDirection::save;
    return (is_block_written && share_block(a, b)) || (is_slot_written && share_slot(a, b));
}

void CopySchedule::submit(std::shared_ptr<CopyJob> job) {
    const CopyDirection direction = job->plan.direction;
    jobs_.push_back(std::move(job));
    ++submitted_[index(direction)];
    ++unended_[index(direction)];
}

const std::shared_ptr<CopyJob>* CopySchedule::find_piece(CopyDirection direction) const noexcept {
    if (unended_[index(direction)] == submitted_[index(direction)]) {
        return nullptr;
    }
    for (const std::shared_ptr<CopyJob>& job : jobs_) {
        const bool is_ready = job->stage == CopyJob::Stage::prepared && job->waits_for.empty();
        if (job->plan.direction == direction && is_ready && job->next < job->runs->total_bytes()) {
            return &job;
        }
    }
    return nullptr;
}

const std::shared_ptr<CopyJob>* CopySchedule::find_submitted() const noexcept {
    const auto found = std::ranges::find(jobs_, CopyJob::Stage::submitted, [](const auto& job) { return job->stage; });
    return found == jobs_.end() ? nullptr : &*found;
}

// Plans are prepared only as far ahead as both directions need to have something to do.
CopySchedule::Choice CopySchedule::choose() const noexcept {
    const std::shared_ptr<CopyJob>* const first = find_piece(turn_);
    const std::shared_ptr<CopyJob>* const second = find_piece(other(turn_));
    const bool is_first_wanting = first == nullptr && submitted_[index(turn_)] > 0;
    const bool is_second_wanting = second == nullptr && submitted_[index(other(turn_))] > 0;
    if (!is_preparing_ && (is_first_wanting || is_second_wanting)) {
        if (const std::shared_ptr<CopyJob>* const job = find_submitted()) {
            return {CopyTask::Kind::prepare, job};
        }
    }
    return {CopyTask::Kind::piece, first != nullptr ? first : second};
}

std::optional<CopyTask> CopySchedule::take() noexcept {
    const Choice choice = choose();
    if (choice.job == nullptr) {
        return {};
    }
    CopyTask task{.kind = choice.kind, .job = *choice.job};
    CopyJob& job = *task.job;
    if (task.kind == CopyTask::Kind::prepare) {
        job.stage = CopyJob::Stage::preparing;
        is_preparing_ = true;
        return task;
    }
    task.begin = job.next;
    task.end = job.next = job.runs->end_part(job.next, piece_bytes_);
    ++job.pieces_out;
    turn_ = other(job.plan.direction);
    return task;
}

std::vector<std::shared_ptr<const CopyJob>> CopySchedule::list_earlier(const CopyJob& job) const {
    std::vector<std::shared_ptr<const CopyJob>> earlier;
    for (const std::shared_ptr<CopyJob>& candidate : jobs_) {
        if (candidate->ticket >= job.ticket) {
            break;
        }
        earlier.push_back(candidate);
    }
    return earlier;
}

void CopySchedule::drop_waiting(const Status& status) {
    for (auto next = jobs_.begin(); next != jobs_.end();) {
        CopyJob& job = **next++;
        if (job.pieces_out == 0 && job.next == 0) {
            drop(job, status);
        }
    }
}

void CopySchedule::drop_running(const Status& status) {
    for (auto next = jobs_.begin(); next != jobs_.end();) {
        CopyJob& job = **next++;
        // A job whose last piece has been handed out has nothing left to drop.
        if (job.stage != CopyJob::Stage::prepared || job.next < job.runs->total_bytes()) {
            drop(job, status);
        }
    }
}

void CopySchedule::drop(CopyJob& job, Status status) noexcept {
    if (job.stage == CopyJob::Stage::preparing) {
        job.status = std::move(status);  // the rest is the preparing thread's, and end_prepare looks
        return;
    }
    if (job.stage == CopyJob::Stage::submitted) {
        job.stage = CopyJob::Stage::prepared;
        --submitted_[index(job.plan.direction)];
    }
    fail(job, std::move(status));
    end_if_done(job);
}

std::list<std::shared_ptr<CopyJob>> CopySchedule::take_ended() noexcept {
    Jobs ended;
    ended.splice(ended.end(), ended_);
    return ended;
}

void CopySchedule::end_prepare(CopyJob& job, Status status) noexcept {
    is_preparing_ = false;
    job.stage = CopyJob::Stage::prepared;
    --submitted_[index(job.plan.direction)];
    // Some may have ended while it was compared with them. A plan without bytes has no order.
    const bool is_empty = job.runs && job.runs->total_bytes() == 0;
    std::erase_if(job.waits_for,
                  [&](const auto& earlier) { return is_empty || earlier->stage == CopyJob::Stage::ended; });
    // It may have been dropped meanwhile.
    if (!status.ok() || !job.status.ok()) {
        fail(job, std::move(status));
    }
    end_if_done(job);
}

void CopySchedule::end_piece(CopyJob& job, Status status) noexcept {
    --job.pieces_out;
    if (!status.ok()) {
        fail(job, std::move(status));
    }
    end_if_done(job);
}

// Keeps the first fault, and hands out no piece any more.
void CopySchedule::fail(CopyJob& job, Status status) noexcept {
    if (job.status.ok()) {
        job.status = std::move(status);
    }
    job.waits_for.clear();
    job.next = job.runs ? job.runs->total_bytes() : 0;
}

void CopySchedule::end_if_done(CopyJob& job) noexcept {
    const bool has_all_out = !job.status.ok() || (job.waits_for.empty() && job.next == job.runs->total_bytes());
    if (job.stage != CopyJob::Stage::prepared || job.pieces_out > 0 || !has_all_out) {
        return;
    }
    const auto place = std::ranges::find(jobs_, &job, [](const auto& unended) { return unended.get(); });
    job.stage = CopyJob::Stage::ended;
    --unended_[index(job.plan.direction)];
    ended_.splice(ended_.end(), jobs_, place);
    for (const std::shared_ptr<CopyJob>& waiting : jobs_) {
        if (waiting->stage != CopyJob::Stage::prepared) {
            break;
        }
        std::erase_if(waiting->waits_for, [&](const auto& earlier) { return earlier.get() == &job; });
    }
}

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

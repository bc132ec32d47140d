#include "fake_cuda/stream.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace kvo::fake {
namespace {

// Delays inside one operation.
constexpr std::size_t kPauses = 3;

template <class... Cases>
struct Overloaded : Cases... {
    using Cases::operator()...;
};

// Returns how many of the operation's `count` parts are done: all, or a random number if the operation fails.
std::size_t parts_done(const Operation& operation, std::size_t count, Pace& pace) {
    return operation.failure == 0 ? count : pace.chance().below(count + 1);
}

void copy_in_pieces(const Operation& operation, const std::vector<std::uint8_t*>& places,
                    const std::vector<Move>& moves, Pace& pace) {
    std::vector<std::size_t> order(moves.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    pace.chance().shuffle(order);
    order.resize(parts_done(operation, order.size(), pace));
    const std::size_t pause_every = order.size() / kPauses + 1;
    for (std::size_t i = 0; i < order.size(); ++i) {
        const std::size_t move = order[i];
        const std::uint64_t length = moves[move].length;
        const std::uint64_t first = pace.chance().below(length + 1);
        std::memcpy(places[2 * move + 1], places[2 * move], first);
        if (i % pause_every == 0) {
            pace.delay();
        }
        std::memcpy(places[2 * move + 1] + first, places[2 * move] + first, length - first);
    }
}

}  // namespace

Stream::Stream(StreamState& shared, AccessCheck& check, Actor actor, int priority, std::uint64_t seed, int turns)
    : shared_(shared),
      check_(check),
      actor_(actor),
      priority_(priority),
      pace_(shared.turns, seed, turns),
      thread_([this] { run(); }) {}

Stream::~Stream() {
    if (thread_.joinable()) {
        {
            const std::lock_guard lock(shared_.mutex);
            finish();
        }
        thread_.join();
    }
}

void Stream::submit(Operation operation) {
    queue_.push_back(std::move(operation));
    ++submitted_;
    shared_.changed.notify_all();
}

void Stream::finish() {
    is_finishing_ = true;
    shared_.changed.notify_all();
}

bool Stream::can_begin() const {
    if (queue_.empty()) {
        return is_finishing_;
    }
    if (shared_.lost_status != 0) {
        return true;
    }
    const auto* const wait = std::get_if<WaitForEvent>(&queue_.front().work);
    return !shared_.is_stalled && (wait == nullptr || wait->event->completed >= wait->record);
}

void Stream::run() {
    std::unique_lock lock(shared_.mutex);
    for (;;) {
        shared_.changed.wait(lock, [this] { return can_begin(); });
        if (queue_.empty()) {
            return;
        }
        if (shared_.lost_status == 0) {
            const Operation operation = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            pace_.delay();
            lock.lock();
            if (shared_.lost_status == 0) {
                perform(operation, lock);
            }
            if (operation.failure != 0 && shared_.lost_status == 0) {
                shared_.lost_status = operation.failure;
            }
            ++completed_;
        } else {
            completed_ += queue_.size();
            queue_.clear();
        }
        shared_.changed.notify_all();
    }
}

void Stream::perform(const Operation& operation, std::unique_lock<std::mutex>& lock) {
    std::visit(
        Overloaded{
            [&](const Transfer& work) { transfer(operation, work, lock); },
            [&](const RunKernel& work) { run_kernel(operation, work, lock); },
            [&](const Compute& work) { compute(operation, work, lock); },
            [&](const RecordEvent& work) { work.event->completed = std::max(work.event->completed, work.record); },
            [&](const WaitForEvent&) {},
        },
        operation.work);
}

void Stream::transfer(const Operation& operation, const Transfer& work, std::unique_lock<std::mutex>& lock) {
    std::vector<Use> uses;
    for (const Move& move : work.moves) {
        uses.push_back({move.source, move.length, AccessKind::read});
        uses.push_back({move.destination, move.length, AccessKind::write});
    }
    const auto places = check_.admit(operation, uses);
    if (!places.empty()) {
        move_unlocked(lock, [&] { copy_in_pieces(operation, places, work.moves, pace_); });
    }
}

// First the lists, which earlier operations may have written, then what they point to.
void Stream::run_kernel(const Operation& operation, const RunKernel& work, std::unique_lock<std::mutex>& lock) {
    const std::uint64_t count = work.runs.count;
    const std::uint64_t list_bytes = count * sizeof(std::uint64_t);
    std::vector<std::vector<std::uint64_t>> lists;
    std::vector<Use> uses;
    for (const std::uint64_t* const list : {work.runs.sources, work.runs.destinations, work.runs.lengths}) {
        uses.push_back({reinterpret_cast<std::uint64_t>(list), list_bytes, AccessKind::read});
        const auto places = count == 0 ? std::vector<std::uint8_t*>{} : check_.admit(operation, {uses.back()});
        if (places.empty()) {
            return;
        }
        lists.emplace_back(count);
        std::memcpy(lists.back().data(), places.front(), list_bytes);
    }
    for (std::uint64_t run = 0; run < count; ++run) {
        uses.push_back({lists[0][run], lists[2][run], AccessKind::read});
        uses.push_back({lists[1][run], lists[2][run], AccessKind::write});
    }
    const auto places = check_.admit(operation, uses);
    if (places.empty()) {
        return;
    }
    for (std::uint64_t run = 0; run < count; ++run) {
        lists[0][run] = reinterpret_cast<std::uint64_t>(places[3 + 2 * run]);
        lists[1][run] = reinterpret_cast<std::uint64_t>(places[4 + 2 * run]);
    }
    std::vector<std::uint64_t> order(work.threads);
    for (std::uint64_t thread = 0; thread < work.threads; ++thread) {
        order[thread] = thread;
    }
    pace_.chance().shuffle(order);
    order.resize(parts_done(operation, order.size(), pace_));
    move_unlocked(lock, [&] {
        for (std::size_t i = 0; i < order.size(); ++i) {
            if (i % (order.size() / kPauses + 1) == 0) {
                pace_.delay();
            }
            copy_runs({lists[0].data(), lists[1].data(), lists[2].data(), count},
                      {order[i], work.threads, work.team_size});
        }
    });
}

void Stream::compute(const Operation& operation, const Compute& work, std::unique_lock<std::mutex>& lock) {
    std::vector<Use> uses;
    for (const Bytes& bytes : work.reads) {
        uses.push_back({bytes.address, bytes.length, AccessKind::read});
    }
    for (const Bytes& bytes : work.writes) {
        uses.push_back({bytes.address, bytes.length, AccessKind::write});
    }
    const auto places = check_.admit(operation, uses);
    if (places.empty()) {
        return;
    }
    move_unlocked(lock, [&] {
        pace_.delay();
        for (std::size_t i = 0; i < work.writes.size(); ++i) {
            for (std::uint64_t at = 0; at < work.writes[i].length; ++at) {
                places[work.reads.size() + i][at] = pattern_byte(work.pattern, at);
            }
        }
    });
}

}  // namespace kvo::fake

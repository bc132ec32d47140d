#include "io/io_queue.hpp"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace kvo {

IoQueue::IoQueue(std::unique_ptr<IoEngine> engine, std::size_t write_depth)
    : engine_(std::move(engine)), write_depth_(write_depth), places_(engine_->depth()) {
    for (std::size_t place = places_.size(); place > 0; --place) {
        free_places_.push_back(place - 1);
    }
}

void IoQueue::submit(const IoOrder& order) { (order.request.kind == IoKind::read ? reads_ : writes_).push_back(order); }

void IoQueue::poll(Instant now, std::vector<IoResult>& results) {
    ended_.clear();
    engine_->poll(ended_);
    for (const IoEnd& ended : ended_) {
        end(ended, results);
    }
    for (std::size_t count = to_issue_.size(); count > 0; --count) {
        const std::size_t place = to_issue_.front();
        to_issue_.erase(to_issue_.begin());
        issue(place);
    }
    expire(now, results);
    begin(reads_, places_.size());
    begin(writes_, write_depth_);
}

void IoQueue::begin(std::deque<IoOrder>& orders, std::size_t limit) {
    const bool are_writes = &orders == &writes_;
    while (!orders.empty() && !free_places_.empty() && (!are_writes || writes_under_way_ < limit)) {
        if (!begin_one(orders.front())) {
            return;
        }
        orders.pop_front();
        writes_under_way_ += are_writes ? 1 : 0;
    }
}

bool IoQueue::begin_one(const IoOrder& order) {
    const std::size_t place = free_places_.back();
    IoRequest request = order.request;
    request.token = place;
    if (engine_->submit({&request, 1}) != 1) {
        return false;
    }
    free_places_.pop_back();
    places_[place] = {order, 0, true, false};
    ++under_way_;
    return true;
}

// Submits the rest of a place's transfer. A part that moved counts rounded down, since the rest must be aligned as
// well.
void IoQueue::issue(std::size_t place) {
    const Place& one = places_[place];
    IoRequest request = one.order.request;
    request.token = place;
    request.offset += one.done;
    request.address += one.done;
    request.length -= one.done;
    if (engine_->submit({&request, 1}) != 1) {
        to_issue_.push_back(place);
    }
}

void IoQueue::end(const IoEnd& ended, std::vector<IoResult>& results) {
    const std::size_t place = ended.token;
    Place& one = places_[place];
    const IoRequest& request = one.order.request;
    if (ended.outcome < 0) {
        // The kernel's ENODATA is a medium that cannot be read; ours is a file that ends.
        const int error = ended.outcome == -ENODATA ? EIO : static_cast<int>(-ended.outcome);
        const bool is_again = error == EINTR || error == EAGAIN;
        if (is_again && !one.is_told) {
            to_issue_.push_back(place);
            return;
        }
        finish(place, error, results);
        return;
    }
    if (request.kind == IoKind::sync || one.done + static_cast<std::uint64_t>(ended.outcome) >= request.length) {
        finish(place, 0, results);
        return;
    }
    const auto moved = static_cast<std::uint32_t>(ended.outcome) / kIoAlignment * kIoAlignment;
    if (moved == 0 || one.is_told) {
        // Nothing moved at all, or less than a block: a file that ends here, or a device that is full.
        finish(place, request.kind == IoKind::read ? ENODATA : ENOSPC, results);
        return;
    }
    one.done += static_cast<std::uint32_t>(moved);
    to_issue_.push_back(place);
}

void IoQueue::finish(std::size_t place, int error, std::vector<IoResult>& results) {
    Place& one = places_[place];
    if (one.is_told) {
        --held_;
        results.push_back({one.order.request.token, 0, false, true});
    } else {
        results.push_back({one.order.request.token, error, false, false});
    }
    --under_way_;
    writes_under_way_ -= one.order.request.kind == IoKind::read ? 0 : 1;
    one.is_used = false;
    free_places_.push_back(place);
}

void IoQueue::expire(Instant now, std::vector<IoResult>& results) {
    for (std::deque<IoOrder>* orders : {&reads_, &writes_}) {
        std::erase_if(*orders, [&](const IoOrder& order) {
            const bool is_over = order.deadline <= now;
            if (is_over) {
                results.push_back({order.request.token, ETIMEDOUT, false, false});
            }
            return is_over;
        });
    }
    for (std::size_t place = 0; place < places_.size(); ++place) {
        Place& one = places_[place];
        if (!one.is_used || one.is_told || one.order.deadline > now) {
            continue;
        }
        if (std::erase(to_issue_, place) > 0) {
            finish(place, ETIMEDOUT, results);
            continue;
        }
        one.is_told = true;
        ++held_;
        results.push_back({one.order.request.token, ETIMEDOUT, true, false});
    }
}

Instant IoQueue::next_deadline() const {
    Instant next = Instant::max();
    for (const std::deque<IoOrder>* orders : {&reads_, &writes_}) {
        for (const IoOrder& order : *orders) {
            next = std::min(next, order.deadline);
        }
    }
    for (const Place& one : places_) {
        if (one.is_used && !one.is_told) {
            next = std::min(next, one.order.deadline);
        }
    }
    return next;
}

bool IoQueue::close(int timeout_ms) {
    reads_.clear();
    writes_.clear();
    return engine_->close(timeout_ms);
}

bool wait_readable(int file, int timeout_ms) {
    pollfd waited{file, POLLIN, 0};
    return ::poll(&waited, 1, timeout_ms) > 0;
}

}  // namespace kvo

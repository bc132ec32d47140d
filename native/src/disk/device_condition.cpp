#include "disk/device_condition.hpp"

#include <algorithm>
#include <utility>

namespace kvo {
namespace {

constexpr std::chrono::seconds kLongestDelay{60};

}  // namespace

DeviceHealth DeviceCondition::health() {
    const std::lock_guard hold(health_lock_);
    return health_;
}

void DeviceCondition::set(DeviceState state, const std::string& reason) {
    ready_since_ = state == DeviceState::ready && state_ != state ? terms_.now() : ready_since_;
    state_ = state;
    reason_ = reason;
    can_read_ = state == DeviceState::ready || state == DeviceState::read_only;
    can_write_ = state == DeviceState::ready;
}

void DeviceCondition::end() { can_read_ = can_write_ = false; }

void DeviceCondition::probe_later() {
    const Instant now = terms_.now();
    const bool is_again = now - ready_since_ < kLongestDelay;
    const std::chrono::milliseconds longest = std::max<std::chrono::milliseconds>(kLongestDelay, terms_.probe_interval);
    delay_ = is_again ? std::clamp(2 * delay_, terms_.probe_interval, longest) : terms_.probe_interval;
    next_probe_ = now + delay_;
}

void DeviceCondition::publish(DeviceHealth health) {
    health.state = state_;
    if (state_ != DeviceState::ready) {
        health.reason = reason_;
    }
    const std::lock_guard hold(health_lock_);
    health_ = std::move(health);
}

}  // namespace kvo

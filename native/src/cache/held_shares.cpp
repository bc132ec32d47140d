#include "cache/held_shares.hpp"

#include <algorithm>
#include <array>

namespace kvo {
namespace {

constexpr std::uint64_t kParts = 3;

constexpr std::array kResources = {&Holding::bytes, &Holding::entries, &Holding::nodes};

}  // namespace

Holding& Holding::operator+=(const Holding& other) noexcept {
    for (const auto resource : kResources) {
        this->*resource += other.*resource;
    }
    return *this;
}

Holding& Holding::operator-=(const Holding& other) noexcept {
    for (const auto resource : kResources) {
        this->*resource -= other.*resource;
    }
    return *this;
}

bool HeldShares::may_hold(OwnerNumber owner, const Holding& more, const Holding& left) const {
    const Holding held = of(owner);
    return owner == kNoOwner || std::ranges::all_of(kResources, [&](const auto resource) {
               return more.*resource == 0 || held.*resource + more.*resource <= kParts * (left.*resource);
           });
}

// With n more of them, it holds held + n * one, and left - n * one remain: n is the largest number for which the first
// is at most three times the second.
std::uint64_t HeldShares::count_allowed(OwnerNumber owner, const Holding& one, std::uint64_t count,
                                        const Holding& left) const {
    if (owner == kNoOwner) {
        return count;
    }
    const Holding held = of(owner);
    for (const auto resource : kResources) {
        if (one.*resource != 0) {
            const std::uint64_t bound = kParts * (left.*resource);
            const std::uint64_t more = bound - std::min(bound, held.*resource);
            count = std::min(count, more / (kParts + 1) / (one.*resource));
        }
    }
    return count;
}

// Users hold by lease, so never less than they really hold: what is beyond that is certainly left.
Holding HeldShares::left_by_users(const Room& room, const Holding& more) const {
    const Holding without_owner = of(kNoOwner);
    Holding left = room.left;
    for (const auto resource : kResources) {
        const std::uint64_t held = total_.*resource - without_owner.*resource + more.*resource;
        left.*resource = std::max(left.*resource, room.all.*resource - std::min(room.all.*resource, held));
    }
    return left;
}

void HeldShares::add(OwnerNumber owner, const Holding& more) {
    total_ += more;
    by_owner_[owner] += more;
}

void HeldShares::subtract(OwnerNumber owner, const Holding& less) {
    total_ -= less;
    const auto found = by_owner_.find(owner);
    if (found != by_owner_.end() && (found->second -= less) == Holding{}) {
        by_owner_.erase(found);
    }
}

Holding HeldShares::of(OwnerNumber owner) const {
    const auto found = by_owner_.find(owner);
    return found == by_owner_.end() ? Holding{} : found->second;
}

}  // namespace kvo

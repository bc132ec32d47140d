// How much the sessions of each user hold in a cache, and whether one user may hold more.
#pragma once

#include <cstdint>
#include <unordered_map>

namespace kvo {

// Number of a user whose sessions have a share of a cache in common.
using OwnerNumber = std::uint32_t;
// The owner of sessions that need no share: the server's own, and those of a cache that only one user can use.
constexpr OwnerNumber kNoOwner = UINT32_MAX;

// Something of each resource that leases and reserved slots take.
struct Holding {
    std::uint64_t bytes = 0;
    std::uint64_t entries = 0;
    std::uint64_t nodes = 0;  // of the lists of leases

    Holding& operator+=(const Holding& other) noexcept;
    Holding& operator-=(const Holding& other) noexcept;
    bool operator==(const Holding&) const = default;
};

// The bytes and entries of a cache, and those that no session holds.
struct Room {
    Holding all;
    Holding left;
};

// A user may hold at most three times what is left for others: one alone gets three quarters of each resource, the next
// one three quarters of the rest, and so on. So something is always left. Belongs to one thread at a time.
class HeldShares {
public:
    // Whether this owner may hold `more` if `left` is free then.
    bool may_hold(OwnerNumber owner, const Holding& more, const Holding& left) const;
    // Of `count` times `one`, how many this owner may hold if `left` is free before, from which they are taken.
    std::uint64_t count_allowed(OwnerNumber owner, const Holding& one, std::uint64_t count, const Holding& left) const;

    // Counts all that no user holds as left, once a user also holds `more`, which room.left is without already. Leases
    // and slots of sessions without an owner take nothing from a user's share, unless users may hold the same entries.
    Holding left_by_users(const Room& room, const Holding& more = {}) const;

    void add(OwnerNumber owner, const Holding& more);
    void subtract(OwnerNumber owner, const Holding& less);

    // Of all owners together, and of those that have none.
    const Holding& total() const noexcept { return total_; }
    Holding of(OwnerNumber owner) const;

private:
    std::unordered_map<OwnerNumber, Holding> by_owner_;  // those who hold something
    Holding total_;
};

}  // namespace kvo

// Reservations: slots that a session may write to, told by tickets, until they are committed or aborted.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "cache/cache_state.hpp"
#include "index/lookup.hpp"

namespace kvo {

constexpr std::uint64_t kNoAddress = UINT64_MAX;

// The result of a call that was left at the writer's lock. The other members may be read once `is_done` is true.
struct LeftReservation {
    std::atomic<bool> is_done = false;
    Status status = {};
    std::vector<Ticket> tickets = {};  // those that were decided
};

// Safe to call from any thread. Slots are taken and given back under the writer's lock, in parts short enough for
// others to get in between; what says whether a ticket is valid takes none.
class Reservations {
public:
    // `state` outlives it.
    explicit Reservations(CacheState& state) : state_(state) {}

    // One ticket for each hash that is not readable already, 0 for those that are; with no hashes, a ticket for each of
    // `tickets`. Returns how many tickets at the front were decided; the rest found no room.
    Result<std::size_t> reserve(SessionId session, TenantNumber tenant, Space space,
                                std::span<const std::uint8_t> hashes, std::span<Ticket> tickets);
    // The slots of valid tickets of this session, as addresses counted over all segments; kNoAddress for ticket 0.
    Status locate(SessionId session, std::span<const Ticket> tickets, std::span<std::uint64_t> addresses) const;
    // How many of the tickets were valid.
    std::size_t abort(SessionId session, std::span<const Ticket> tickets);

    // The same for a thread that never waits for the writer's lock: the work under it is done at once if the lock is
    // free, else soon by the thread that holds it, in the order of the calls.
    std::shared_ptr<const LeftReservation> leave_reserve(SessionId session, TenantNumber tenant, Space space,
                                                         std::vector<std::uint8_t> hashes);
    void leave_abort(SessionId session, const std::vector<Ticket>& tickets);

    // Whether the ticket is one of the session at this place.
    bool is_valid(std::uint16_t place, Ticket ticket) const;
    // The slot of a valid ticket, and the space of its entry.
    std::optional<Slot> slot_of(std::uint16_t place, Ticket ticket, Space& space) const;
    // Notes that `count` reservations of the session, all of one group, have ended. The caller holds the writer's lock.
    void note_ends(SessionId session, std::uint32_t count, std::uint64_t slot_bytes);

    // Adds an entry that a dead process left reserved for the session at this place.
    void adopt(std::uint16_t place, EntryNumber entry);
    // Ends all reservations of a session whose processes have exited. False: this is not over yet, and must be called
    // again.
    bool end_all(SessionId session);

    // Those that found everything in use, since this process has the cache.
    std::uint64_t refused() const noexcept { return refused_.load(std::memory_order_relaxed); }

    // The refused ones for which all the pool's room was in use; the others were over their session's limit,
    // or their tenant's quota is used up, which room that others give up does not change.
    // Promotions, which use leave_reserve, are not counted: no retained block should give way to them.
    std::uint64_t without_room() const noexcept { return without_room_.load(std::memory_order_relaxed); }

private:
    struct LeftJob;
    // A reservation on its way, part by part.
    struct Reserving {
        SessionId session = 0;
        TenantNumber tenant = 0;
        Space space = 0;
        std::span<const std::uint8_t> hashes = {};
        std::span<Ticket> tickets = {};
        NamespaceUse name_space = {};
        std::array<Found, CacheState::kPart> found = {};  // of the part [begin, end)
        std::size_t begin = 0;
        std::size_t end = 0;
        std::size_t next = 0;  // so many are decided
        bool is_left = false;
        std::uint64_t charged = 0;  // slots, for those that come next
        Effort effort = {};
        Status status = {};
    };

    Status begin(Reserving& reserving) const;
    void find_next(Reserving& reserving) const;
    bool reserve_next(Reserving& reserving);
    void make_left(const std::shared_ptr<LeftJob>& job);
    std::size_t abort_part(SessionId session, std::span<const Ticket> tickets);
    void end_one(SessionId session, EntryNumber entry);
    void end_from(SessionId session, EntryNumber begin);

    CacheState& state_;
    std::array<std::atomic<std::uint32_t>, kSessionLimit> count_by_place_{};
    std::array<std::atomic<bool>, kSessionLimit> is_searched_{};  // for what the place's session has reserved
    std::atomic<std::uint64_t> refused_ = 0;
    std::atomic<std::uint64_t> without_room_ = 0;
};

}  // namespace kvo

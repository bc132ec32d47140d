// Engines with all their processes. What a session reads and writes is taken back when the last process has exited, by
// the kernel's word: never by a timer, never because a connection was closed.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/status.hpp"
#include "cache/held_shares.hpp"
#include "index/index_view.hpp"
#include "shim/process_handle.hpp"

namespace kvo {

// Generation in the upper 16 bits, place in the table in the lower ones; never 0.
using SessionId = std::uint32_t;
constexpr std::uint16_t session_place(SessionId id) { return static_cast<std::uint16_t>(id & 0xffff); }

enum class SessionState : std::uint32_t {
    free,
    open,
    quarantined,  // its connection is gone: it gets nothing new, and keeps what it has until its processes exit
};

// Safe to call from any thread.
class SessionTable {
public:
    using Reserve = std::function<Status(const Region&, std::uint64_t item_count)>;
    using HasSign = std::function<bool(std::uint16_t place)>;
    using CountRoom = std::function<Room()>;

    // `has_sign`: whether a process is there that has the memory for the session at a place. `count_room`: the bytes
    // and entries that there are, and those that no session holds; nodes do not count.
    SessionTable(
        const IndexView& view, Reserve reserve, HasSign has_sign = [](std::uint16_t) { return true; },
        CountRoom count_room = [] { return Room{}; });

    // `held_limit_bytes`: what its leases and reservations together may hold. `owner`: the user whose share they are
    // taken from.
    Result<SessionId> open(std::uint64_t held_limit_bytes, OwnerNumber owner = kNoOwner);

    // Adds a process, as long as which the session lives. Code::invalid: no such session, or it is full.
    Status add_member(SessionId id, ProcessHandle process);

    // Notes that from now on every process that has the memory for this session leaves a sign of it, by which our
    // successor knows it. `heeds`: it knows that memory may be given back. False: no such session.
    bool note_signs(SessionId id, bool heeds = true);
    // Whether all processes that may have the memory know that it may be given back.
    bool all_heed() const;

    // False: no such session. A session without processes is ended by this; `take_ended` tells.
    bool quarantine(SessionId id);

    // Sessions all of whose processes have exited, and quarantined ones that never had any. They get nothing new from
    // the first time on, and are told until the caller has taken back what they hold.
    std::vector<SessionId> take_ended();
    // False, and it stays: it holds something still, as a call of another thread was under way when it ended.
    bool forget(SessionId id);

    // Open, or quarantined; what is left of a session may be released and aborted by it in both states.
    bool is_known(SessionId id) const;
    bool is_open(SessionId id) const;

    // Charges a session for a lease whose entries are held already. False if the session is not open, or would hold
    // more than its limit or its owner's share; then nothing is charged.
    bool charge(SessionId id, const Holding& lease);
    // Charges it for as many of `count` entries of so many bytes as limit and share allow; returns how many.
    std::uint64_t charge_some(SessionId id, std::uint64_t bytes, std::uint64_t count);
    void discharge(SessionId id, const Holding& held);
    std::uint64_t held_bytes(SessionId id) const;

    // The session at a place, 0: none.
    SessionId at(std::uint16_t place) const;

    // Takes over what a dead process left: sessions whose processes have all exited end at the next take_ended, the
    // others are quarantined until their engines come back (`reopen`) or exit. A process that cannot be seen from here
    // (it or the dead process is in another PID namespace) counts as exited when there is no sign of it, and never if
    // its session left no signs.
    void adopt();
    // Charges a session of a dead process for what it held, whatever its limit. Its owner is not known.
    void charge_adopted(std::uint16_t place, const Holding& held);
    // The engine of a quarantined session is connected again, and adds its processes again. Those that are known and
    // live count as before, whether it does or not. What it holds is taken from the share of `owner`, if that is named.
    bool reopen(SessionId id, OwnerNumber owner = kNoOwner);

    std::uint32_t count() const;

private:
    struct Session {
        std::uint32_t generation = 0;
        SessionState state = SessionState::free;
        bool is_ending = false;
        std::uint64_t limit_bytes = 0;
        OwnerNumber owner = kNoOwner;
        std::vector<ProcessHandle> members;
        std::vector<ProcessIdentity> identities;  // of each member; pid 0: not known
        std::uint32_t unknown_members = 0;
        bool heeds = true;
        bool has_unseen = false;  // maybe: as long as there is a sign
        Holding held;
    };

    Session* find(SessionId id) const;
    void set_state(std::uint16_t place, SessionState state);
    void write_members(std::uint16_t place);
    void write_member(std::uint16_t place, std::uint32_t position, const ProcessIdentity& identity);
    Session* find_chargeable(SessionId id) const;
    void add_held(Session& session, const Holding& more);

    const IndexView view_;
    const Reserve reserve_;
    const HasSign has_sign_;
    const CountRoom count_room_;
    mutable std::mutex mutex_;
    HeldShares shares_;
    std::vector<std::unique_ptr<Session>> sessions_;  // by place
};

}  // namespace kvo

#include "cache/session_table.hpp"

#include <algorithm>
#include <string>
#include <utility>

#include "base/memory_order.hpp"

namespace kvo {
namespace {

bool has_exited(const ProcessHandle& process) { return process.has_exited(); }

constexpr SessionId make_session(std::uint32_t generation, std::size_t place) {
    return (generation << 16) | static_cast<std::uint32_t>(place);
}
constexpr std::uint32_t next_generation(std::uint32_t generation) {
    return (generation + 1) % 0x10000 == 0 ? 1 : (generation + 1) % 0x10000;
}

}  // namespace

SessionTable::SessionTable(const IndexView& view, Reserve reserve, HasSign has_sign, CountRoom count_room)
    : view_(view), reserve_(std::move(reserve)), has_sign_(std::move(has_sign)), count_room_(std::move(count_room)) {}

Result<SessionId> SessionTable::open(std::uint64_t held_limit_bytes, OwnerNumber owner) {
    const std::lock_guard lock(mutex_);
    std::size_t place = 0;
    while (place < sessions_.size() && sessions_[place]->state != SessionState::free) {
        ++place;
    }
    if (place == kSessionLimit) {
        return Status(Code::failed, "there are " + std::to_string(kSessionLimit) + " sessions, more are not served");
    }
    if (place == sessions_.size()) {
        if (Status status = reserve_(view_.regions.sessions, place + 1); !status.ok()) {
            return status;
        }
        sessions_.push_back(std::make_unique<Session>());
        view_.header->session_count.store(static_cast<std::uint32_t>(place + 1), kRelease);
    }
    Session& session = *sessions_[place];
    session.generation = next_generation(session.generation);
    session.is_ending = false;
    session.limit_bytes = held_limit_bytes;
    session.owner = owner;
    session.members.clear();
    session.identities.clear();
    session.unknown_members = 0;
    session.heeds = true;
    session.has_unseen = false;
    session.held = {};
    SessionRecord& record = view_.sessions[place];
    record.generation = session.generation;
    record.held_limit_bytes = held_limit_bytes;
    record.member_count = 0;
    record.signs = 0;
    set_state(static_cast<std::uint16_t>(place), SessionState::open);
    return make_session(session.generation, place);
}

Status SessionTable::add_member(SessionId id, ProcessHandle process) {
    const std::lock_guard lock(mutex_);
    Session* const session = find(id);
    if (session == nullptr || session->state != SessionState::open || session->is_ending) {
        return {Code::invalid, "no session " + std::to_string(id) + " is open"};
    }
    // A process that cannot be named for our successor is written as unknown: the engine itself must then name it
    // again. The identity is read first: if the process is still there afterwards, the number was its own.
    const Result<ProcessIdentity> seen = identify_process(process.pid());
    const bool is_over = process.has_exited();
    const ProcessIdentity identity = seen.ok() && !is_over ? seen.value() : ProcessIdentity{};
    if (identity.pid != 0 && std::ranges::find(session->identities, identity) != session->identities.end()) {
        return {};
    }
    if (std::ranges::any_of(session->members, [&](const ProcessHandle& other) { return other.is_same(process); })) {
        return {};
    }
    const std::uint32_t position = view_.sessions[session_place(id)].member_count;
    if (session->members.size() >= kMemberLimit || position >= kMemberLimit) {
        return {Code::invalid, "a session has at most " + std::to_string(kMemberLimit) + " processes"};
    }
    if (!is_over) {
        write_member(session_place(id), position, identity);
    }
    session->identities.push_back(identity);
    session->members.push_back(std::move(process));
    if (session->unknown_members != 0 && --session->unknown_members == 0) {
        write_members(session_place(id));
    }
    return {};
}

// Anew, without those that have gone.
void SessionTable::write_members(std::uint16_t place) {
    const Session& session = *sessions_[place];
    // In the same order, so that one is written over only when its new place has been.
    std::uint32_t count = 0;
    for (std::size_t i = 0; i < session.members.size(); ++i) {
        if (!session.members[i].has_exited()) {
            write_member(place, count++, session.identities[i]);
        }
    }
    view_.sessions[place].member_count = count;
}

// The record counts once it stands.
void SessionTable::write_member(std::uint16_t place, std::uint32_t position, const ProcessIdentity& identity) {
    SessionRecord& record = view_.sessions[place];
    record.members[position].pid = identity.pid;
    record.members[position].start_ticks = identity.start_ticks;
    std::atomic_signal_fence(std::memory_order_release);
    record.member_count = std::max(record.member_count, position + 1);
}

bool SessionTable::note_signs(SessionId id, bool heeds) {
    const std::lock_guard lock(mutex_);
    Session* const session = find(id);
    if (session == nullptr) {
        return false;
    }
    session->heeds = session->heeds && heeds;
    view_.sessions[session_place(id)].signs = session->heeds ? kIsSigned | kHeeds : kIsSigned;
    return true;
}

bool SessionTable::all_heed() const {
    const std::lock_guard lock(mutex_);
    return std::ranges::all_of(sessions_, [](const std::unique_ptr<Session>& session) {
        return session->state == SessionState::free || session->heeds;
    });
}

bool SessionTable::quarantine(SessionId id) {
    const std::lock_guard lock(mutex_);
    Session* const session = find(id);
    if (session == nullptr) {
        return false;
    }
    set_state(session_place(id), SessionState::quarantined);
    return true;
}

std::vector<SessionId> SessionTable::take_ended() {
    const std::lock_guard lock(mutex_);
    std::vector<SessionId> ended;
    for (std::size_t place = 0; place < sessions_.size(); ++place) {
        Session& session = *sessions_[place];
        if (session.state == SessionState::free) {
            continue;
        }
        session.has_unseen = session.has_unseen && has_sign_(static_cast<std::uint16_t>(place));
        const bool may_have_more = session.has_unseen || session.unknown_members != 0 ||
                                   (session.members.empty() && session.state == SessionState::open);
        session.is_ending = session.is_ending || (!may_have_more && std::ranges::all_of(session.members, has_exited));
        if (session.is_ending) {
            ended.push_back(make_session(session.generation, place));
        }
    }
    return ended;
}

bool SessionTable::forget(SessionId id) {
    const std::lock_guard lock(mutex_);
    Session* const session = find(id);
    if (session == nullptr || !session->is_ending || session->held.bytes != 0) {
        return false;
    }
    session->members.clear();
    session->identities.clear();
    set_state(session_place(id), SessionState::free);
    return true;
}

bool SessionTable::is_known(SessionId id) const {
    const std::lock_guard lock(mutex_);
    return find(id) != nullptr;
}

bool SessionTable::is_open(SessionId id) const {
    const std::lock_guard lock(mutex_);
    const Session* const session = find(id);
    return session != nullptr && session->state == SessionState::open && !session->is_ending;
}

bool SessionTable::charge(SessionId id, const Holding& lease) {
    const std::lock_guard lock(mutex_);
    Session* const session = find_chargeable(id);
    if (session == nullptr ||
        lease.bytes > session->limit_bytes - std::min(session->limit_bytes, session->held.bytes)) {
        return false;
    }
    Room room = count_room_();
    room.all.nodes = view_.header->lease_node_limit;
    if (!shares_.may_hold(session->owner, lease, shares_.left_by_users(room, lease))) {
        return false;
    }
    add_held(*session, lease);
    return true;
}

std::uint64_t SessionTable::charge_some(SessionId id, std::uint64_t bytes, std::uint64_t count) {
    const std::lock_guard lock(mutex_);
    Session* const session = find_chargeable(id);
    if (session == nullptr) {
        return 0;
    }
    const std::uint64_t left = session->limit_bytes - std::min(session->limit_bytes, session->held.bytes);
    const std::uint64_t within = bytes == 0 ? count : std::min(count, left / bytes);
    const std::uint64_t granted = shares_.count_allowed(session->owner, {.bytes = bytes, .entries = 1}, within,
                                                        shares_.left_by_users(count_room_()));
    add_held(*session, {.bytes = granted * bytes, .entries = granted});
    return granted;
}

void SessionTable::discharge(SessionId id, const Holding& held) {
    const std::lock_guard lock(mutex_);
    if (Session* const session = find(id); session != nullptr) {
        session->held -= held;
        shares_.subtract(session->owner, held);
    }
}

std::uint64_t SessionTable::held_bytes(SessionId id) const {
    const std::lock_guard lock(mutex_);
    const Session* const session = find(id);
    return session == nullptr ? 0 : session->held.bytes;
}

SessionId SessionTable::at(std::uint16_t place) const {
    const std::lock_guard lock(mutex_);
    if (place >= sessions_.size() || sessions_[place]->state == SessionState::free) {
        return 0;
    }
    return make_session(sessions_[place]->generation, place);
}

void SessionTable::adopt() {
    const std::lock_guard lock(mutex_);
    sessions_.clear();
    const std::uint32_t count = std::min(view_.header->session_count.load(kRelaxed), kSessionLimit);
    for (std::uint32_t place = 0; place < count; ++place) {
        SessionRecord& record = view_.sessions[place];
        auto session = std::make_unique<Session>();
        session->generation = std::max(record.generation % 0x10000, 1u);
        session->limit_bytes = record.held_limit_bytes;
        sessions_.push_back(std::move(session));
        if (record.state.load(kRelaxed) == static_cast<std::uint32_t>(SessionState::free)) {
            continue;
        }
        const std::uint32_t members = std::min(record.member_count, kMemberLimit);
        for (std::uint32_t i = 0; i < members; ++i) {
            const ProcessIdentity identity{record.members[i].pid, record.members[i].start_ticks};
            auto process =
                identity.pid > 0 ? ProcessHandle::open(identity) : Status(Code::failed, "its number is not known");
            if (process.ok()) {
                sessions_.back()->members.push_back(std::move(process.value()));
                sessions_.back()->identities.push_back(identity);
            } else if (process.fault().code() != Code::unavailable && (record.signs & kIsSigned) == 0) {
                ++sessions_.back()->unknown_members;
            }  // else it is gone: a session with no process left ends at the next take_ended
        }
        sessions_.back()->has_unseen = (record.signs & kIsSigned) != 0;
        sessions_.back()->heeds = (record.signs & kHeeds) != 0 || (record.signs == 0 && record.member_count == 0);
        set_state(static_cast<std::uint16_t>(place), SessionState::quarantined);
    }
}

void SessionTable::charge_adopted(std::uint16_t place, const Holding& held) {
    const std::lock_guard lock(mutex_);
    add_held(*sessions_[place], held);
}

bool SessionTable::reopen(SessionId id, OwnerNumber owner) {
    const std::lock_guard lock(mutex_);
    Session* const session = find(id);
    if (session == nullptr || session->is_ending) {
        return false;
    }
    for (std::size_t i = session->members.size(); i-- > 0;) {
        if (session->members[i].has_exited()) {
            session->members.erase(session->members.begin() + static_cast<std::ptrdiff_t>(i));
            session->identities.erase(session->identities.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
    // Processes that cannot be seen from here may live: as many as were not seen must be named first.
    if (session->unknown_members == 0) {
        write_members(session_place(id));
    }
    if (owner != kNoOwner && session->owner != owner) {
        shares_.subtract(session->owner, session->held);
        session->owner = owner;
        shares_.add(owner, session->held);
    }
    set_state(session_place(id), SessionState::open);
    return true;
}

std::uint32_t SessionTable::count() const {
    const std::lock_guard lock(mutex_);
    return static_cast<std::uint32_t>(
        std::ranges::count_if(sessions_, [](const auto& session) { return session->state != SessionState::free; }));
}

SessionTable::Session* SessionTable::find(SessionId id) const {
    const std::uint16_t place = session_place(id);
    if (place >= sessions_.size()) {
        return nullptr;
    }
    Session* const session = sessions_[place].get();
    const bool is_it = session->state != SessionState::free && make_session(session->generation, place) == id;
    return is_it ? session : nullptr;
}

// A session that is open and not ending.
SessionTable::Session* SessionTable::find_chargeable(SessionId id) const {
    Session* const session = find(id);
    return session == nullptr || session->state != SessionState::open || session->is_ending ? nullptr : session;
}

void SessionTable::add_held(Session& session, const Holding& more) {
    session.held += more;
    shares_.add(session.owner, more);
}

void SessionTable::set_state(std::uint16_t place, SessionState state) {
    sessions_[place]->state = state;
    view_.sessions[place].state.store(static_cast<std::uint32_t>(state), kRelease);
}

}  // namespace kvo

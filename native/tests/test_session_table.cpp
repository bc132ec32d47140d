#include "cache/session_table.hpp"

#include <random>

#include "cache_fixture.hpp"
#include "child_process.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

struct Sessions {
    IndexFile index = small_index();
    SessionTable table{index.view(), reserve_in(index), [this](std::uint16_t place) { return index.has_sign(place); }};

    SessionId open(std::uint64_t limit = 1000) { return value_of(table.open(limit)); }
    SessionRecord& record(SessionId id) { return index.view().sessions[session_place(id)]; }
};

ChildProcess idle_child() {
    return ChildProcess([](const Line& line) {
        line.await();
        return 0;
    });
}

ProcessHandle handle_of(pid_t pid) { return value_of(ProcessHandle::open(value_of(identify_process(pid)))); }

void end(ChildProcess& child) {
    child.send_signal(SIGKILL);
    child.wait_zombie();
}

using Ids = std::vector<SessionId>;

}  // namespace

TEST(of_several_that_are_charged_at_once_as_many_are_granted_as_the_limit_allows) {
    Sessions sessions;
    const SessionId id = sessions.open(100);
    CHECK_EQUAL(sessions.table.charge_some(id, 30, 2), 2u);
    CHECK_EQUAL(sessions.table.charge_some(id, 30, 2), 1u);
    CHECK_EQUAL(sessions.table.charge_some(id, 30, 2), 0u);
    CHECK_EQUAL(sessions.table.held_bytes(id), 90u);
    CHECK(sessions.table.quarantine(id));
    CHECK_EQUAL(sessions.table.charge_some(id, 1, 1), 0u);
}

TEST(a_session_holds_at_most_its_limit) {
    Sessions sessions;
    const SessionId id = sessions.open(100);
    CHECK(id != 0);
    CHECK(sessions.table.is_known(id) && sessions.table.is_open(id));
    CHECK(sessions.table.charge(id, {.bytes = 60}));
    CHECK(!sessions.table.charge(id, {.bytes = 41}));
    CHECK_EQUAL(sessions.table.held_bytes(id), 60u);
    CHECK(sessions.table.charge(id, {.bytes = 40}));
    sessions.table.discharge(id, {.bytes = 100});
    CHECK_EQUAL(sessions.table.held_bytes(id), 0u);
    CHECK_EQUAL(sessions.table.at(session_place(id)), id);
    CHECK_EQUAL(sessions.table.count(), 1u);
}

TEST(a_users_lease_is_granted_though_the_servers_own_sessions_hold_all_the_rest) {
    IndexFile index = small_index();
    Room room{.all = {.bytes = 100, .entries = 100}, .left = {.bytes = 100, .entries = 100}};
    SessionTable table(index.view(), reserve_in(index), [](std::uint16_t) { return true; }, [&room] { return room; });
    const auto take = [&](std::uint64_t size) { return room.left -= Holding{.bytes = size, .entries = size}; };
    const SessionId hostile = value_of(table.open(kNoLimit, 1));
    const SessionId honest = value_of(table.open(kNoLimit, 2));
    CHECK_EQUAL(table.charge_some(hostile, 1, 100), 75u);
    take(75);
    const SessionId servers_own = value_of(table.open(kNoLimit));
    take(20);
    CHECK(table.charge(servers_own, {.bytes = 20, .entries = 20}));

    take(5);
    CHECK(table.charge(honest, {.bytes = 5, .entries = 5}));
    CHECK_EQUAL(table.charge_some(hostile, 1, 1), 0u);
    CHECK(!table.charge(hostile, {.bytes = 1, .entries = 1}));
}

TEST(ids_that_are_none_do_nothing) {
    Sessions sessions;
    const SessionId id = sessions.open();
    for (const SessionId other : {SessionId{0}, id + 1, id + (1u << 16), id + (3u << 16), ~0u}) {
        CHECK(!sessions.table.is_known(other) && !sessions.table.is_open(other));
        CHECK(!sessions.table.charge(other, {.bytes = 1}));
        sessions.table.discharge(other, {.bytes = 1});
        CHECK(!sessions.table.quarantine(other));
        CHECK(!sessions.table.reopen(other));
        CHECK(!sessions.table.forget(other));
        CHECK_EQUAL(sessions.table.held_bytes(other), 0u);
        CHECK(sessions.table.add_member(other, handle_of(getpid())).code() == Code::invalid);
    }
    CHECK_EQUAL(sessions.table.at(1), 0u);
    CHECK_EQUAL(sessions.table.at(0xffff), 0u);
    CHECK_EQUAL(sessions.table.held_bytes(id), 0u);
    CHECK(sessions.table.is_open(id));
}

TEST(a_session_lives_as_long_as_any_of_its_processes) {
    Sessions sessions;
    const SessionId id = sessions.open();
    ChildProcess first = idle_child();
    ChildProcess second = idle_child();
    CHECK(sessions.table.add_member(id, handle_of(first.pid())).ok());
    CHECK(sessions.table.add_member(id, handle_of(second.pid())).ok());
    CHECK(sessions.table.charge(id, {.bytes = 10}));

    CHECK(sessions.table.quarantine(id));
    CHECK(sessions.table.is_known(id) && !sessions.table.is_open(id));
    CHECK(!sessions.table.charge(id, {.bytes = 1}));
    CHECK(sessions.table.add_member(id, handle_of(getpid())).code() == Code::invalid);
    CHECK(sessions.table.take_ended().empty());
    end(first);
    CHECK(sessions.table.take_ended().empty());
    second.send_signal(SIGSTOP);
    second.wait_stopped();
    CHECK(sessions.table.take_ended().empty());
    CHECK(!sessions.table.forget(id));
    end(second);
    CHECK(sessions.table.take_ended() == Ids{id});

    // Told until what it holds is given back.
    CHECK(!sessions.table.forget(id));
    CHECK(sessions.table.take_ended() == Ids{id});
    CHECK(!sessions.table.reopen(id));
    sessions.table.discharge(id, {.bytes = 10});
    CHECK(sessions.table.forget(id));
    CHECK(!sessions.table.forget(id));
    CHECK(sessions.table.take_ended().empty());
    CHECK(!sessions.table.is_known(id));
    const SessionId next = sessions.open();
    CHECK_EQUAL(session_place(next), session_place(id));
    CHECK(next != id && sessions.table.is_known(next) && !sessions.table.is_known(id));
}

TEST(an_open_session_whose_processes_are_gone_ends_too) {
    Sessions sessions;
    const SessionId id = sessions.open();
    CHECK(sessions.table.take_ended().empty());  // none yet
    ChildProcess child = idle_child();
    CHECK(sessions.table.add_member(id, handle_of(child.pid())).ok());
    end(child);
    CHECK(sessions.table.is_open(id));
    CHECK(sessions.table.take_ended() == Ids{id});
    CHECK(!sessions.table.is_open(id) && !sessions.table.charge(id, {.bytes = 1}));
}

TEST(a_session_without_processes_ends_with_its_connection) {
    Sessions sessions;
    const SessionId id = sessions.open();
    CHECK(sessions.table.quarantine(id));
    CHECK(sessions.table.take_ended() == Ids{id});
    CHECK(sessions.table.forget(id));
    CHECK_EQUAL(sessions.table.count(), 0u);
}

TEST(a_process_that_has_exited_already_keeps_nothing) {
    Sessions sessions;
    const SessionId id = sessions.open();
    ChildProcess child = idle_child();
    ProcessHandle handle = handle_of(child.pid());
    child.send_signal(SIGKILL);
    child.wait_exit();
    CHECK(sessions.table.add_member(id, std::move(handle)).ok());
    CHECK_EQUAL(sessions.record(id).member_count, 0u);  // a successor could take its number for another's
    CHECK(sessions.table.take_ended() == Ids{id});
}

TEST(there_are_bounds_of_processes_and_sessions) {
    Sessions sessions;
    const SessionId id = sessions.open();
    std::vector<std::unique_ptr<ChildProcess>> children;
    for (std::uint32_t i = 0; i <= kMemberLimit; ++i) {
        children.push_back(std::unique_ptr<ChildProcess>(new ChildProcess(idle_child())));
        const Status status = sessions.table.add_member(id, handle_of(children.back()->pid()));
        CHECK_EQUAL(status.ok(), i < kMemberLimit);
    }
    CHECK(sessions.table.add_member(id, handle_of(children[5]->pid())).ok());  // known already
    CHECK_EQUAL(sessions.record(id).member_count, kMemberLimit);
    for (std::uint32_t i = 1; i < kSessionLimit; ++i) {
        sessions.open();
    }
    CHECK(sessions.table.open(1).fault().code() == Code::failed);
    CHECK_EQUAL(sessions.table.count(), kSessionLimit);
}

TEST(a_successor_waits_for_the_same_processes) {
    Sessions sessions;
    ChildProcess alive = idle_child();
    ChildProcess dead = idle_child();
    const SessionId living = sessions.open(500);
    const SessionId ended = sessions.open();
    const SessionId forgotten = sessions.open();
    const SessionId nobodys = sessions.open();
    CHECK(sessions.table.add_member(living, handle_of(alive.pid())).ok());
    CHECK(sessions.table.add_member(living, handle_of(dead.pid())).ok());
    CHECK(sessions.table.add_member(ended, handle_of(dead.pid())).ok());
    CHECK(sessions.table.quarantine(forgotten));
    sessions.table.take_ended();
    CHECK(sessions.table.forget(forgotten));
    dead.send_signal(SIGKILL);
    dead.wait_exit();

    SessionTable successor(sessions.index.view(), reserve_in(sessions.index));
    successor.adopt();
    CHECK_EQUAL(successor.count(), 3u);
    CHECK(successor.is_known(living) && !successor.is_open(living) && !successor.is_known(forgotten));
    successor.charge_adopted(session_place(living), {.bytes = 400});
    CHECK((successor.take_ended() == Ids{ended, nobodys}));
    CHECK(!successor.reopen(ended));
    CHECK(successor.forget(ended) && successor.forget(nobodys));

    CHECK(successor.reopen(living));
    CHECK(successor.is_open(living));
    CHECK(!successor.charge(living, {.bytes = 101}));
    CHECK(successor.charge(living, {.bytes = 100}));
    CHECK(successor.add_member(living, handle_of(alive.pid())).ok());
    CHECK_EQUAL(sessions.record(living).member_count, 1u);
    const SessionId next = value_of(successor.open(1));
    CHECK(next != ended && next != nobodys && next != forgotten && next != living);
    successor.discharge(living, {.bytes = 500});
    end(alive);
    CHECK(successor.take_ended() == Ids{living});
}

TEST(a_process_known_before_counts_though_its_engine_does_not_add_it_again) {
    Sessions sessions;
    ChildProcess forgetful = idle_child();
    ChildProcess other = idle_child();
    const SessionId id = sessions.open();
    CHECK(sessions.table.add_member(id, handle_of(forgetful.pid())).ok());
    SessionTable successor(sessions.index.view(), reserve_in(sessions.index));
    successor.adopt();
    CHECK(successor.reopen(id));
    CHECK(successor.add_member(id, handle_of(other.pid())).ok());
    end(other);
    CHECK(successor.take_ended().empty());  // the first one may still copy
    SessionTable third(sessions.index.view(), reserve_in(sessions.index));
    third.adopt();
    CHECK(third.take_ended().empty());
    end(forgetful);
    CHECK(successor.take_ended() == Ids{id});
    CHECK(third.take_ended() == Ids{id});
}

TEST(a_process_that_nobody_could_name_counts_as_alive) {
    Sessions sessions;
    const SessionId id = sessions.open();
    ChildProcess child = idle_child();
    CHECK(sessions.table.add_member(id, handle_of(child.pid())).ok());
    sessions.record(id).members[0].pid = 0;  // as of another PID namespace
    end(child);
    SessionTable successor(sessions.index.view(), reserve_in(sessions.index));
    successor.adopt();
    CHECK(successor.take_ended().empty());
    CHECK(successor.quarantine(id));
    CHECK(successor.take_ended().empty());
    CHECK(successor.reopen(id));  // its engine tells
    CHECK(successor.add_member(id, handle_of(child.pid())).ok());
    CHECK(successor.take_ended() == Ids{id});
}

TEST(who_was_not_seen_still_counts_when_the_engine_comes_back) {
    Sessions sessions;
    const SessionId id = sessions.open();
    ChildProcess seen = idle_child();
    ChildProcess unseen = idle_child();
    CHECK(sessions.table.add_member(id, handle_of(unseen.pid())).ok());
    CHECK(sessions.table.add_member(id, handle_of(seen.pid())).ok());
    sessions.record(id).members[0].pid = 0;  // as of another PID namespace
    SessionTable successor(sessions.index.view(), reserve_in(sessions.index));
    successor.adopt();
    CHECK(successor.reopen(id));
    end(seen);
    CHECK(successor.take_ended().empty());
    SessionTable third(sessions.index.view(), reserve_in(sessions.index));
    third.adopt();
    CHECK(third.take_ended().empty());
    CHECK(successor.add_member(id, handle_of(unseen.pid())).ok());
    CHECK_EQUAL(sessions.record(id).member_count, 1u);
    CHECK(successor.take_ended().empty());
    end(unseen);
    CHECK(successor.take_ended() == Ids{id});
    CHECK(successor.add_member(id, handle_of(getpid())).code() == Code::invalid);  // it is ending
}

TEST(a_process_of_a_namespace_that_is_not_ours_lives_as_long_as_there_is_a_sign_of_it) {
    Sessions sessions;
    const SessionId id = sessions.open();
    const SessionId gone = sessions.open();
    FileDescriptor sign = value_of(sessions.index.open_signed(session_place(id)));
    for (const SessionId one : {id, gone}) {
        CHECK(sessions.table.note_signs(one));
        // The first process could not be named; the second has a number that no process has here, or that another has.
        sessions.record(one).member_count = 2;
        sessions.record(one).members[0] = {};
        sessions.record(one).members[1] = {.pid = getpid(), .reserved = 0, .start_ticks = 1};
    }
    CHECK(!sessions.table.note_signs(gone + 1));

    for (int successors = 0; successors < 2; ++successors) {
        SessionTable successor(sessions.index.view(), reserve_in(sessions.index),
                               [&](std::uint16_t place) { return sessions.index.has_sign(place); });
        successor.adopt();
        CHECK(successor.take_ended() == Ids{gone});
        CHECK(successor.is_known(id));
        // It comes back, still cannot be seen, and its record is rewritten: only the sign is left of it.
        CHECK(successor.reopen(id));
        CHECK_EQUAL(sessions.record(id).member_count, 0u);
        CHECK(successor.take_ended() == Ids{gone});
        if (successors == 1) {
            ChildProcess child = idle_child();
            CHECK(successor.add_member(id, handle_of(child.pid())).ok());
            end(child);
            CHECK(successor.take_ended() == Ids{gone});
            sign = FileDescriptor();
            const Ids both{id, gone};
            CHECK(successor.take_ended() == both);
        }
    }
}

TEST(damaged_records_harm_no_other_session) {
    std::mt19937_64 random(3);
    for (int round = 0; round < 300; ++round) {
        Sessions sessions;
        const SessionId whole = sessions.open();
        CHECK(sessions.table.add_member(whole, handle_of(getpid())).ok());
        const SessionId damaged = sessions.open();
        CHECK(sessions.table.add_member(damaged, handle_of(getpid())).ok());
        auto* const bytes = reinterpret_cast<std::uint8_t*>(&sessions.record(damaged));
        for (int i = 0; i < 6; ++i) {
            bytes[random() % 40] = static_cast<std::uint8_t>(random());
        }
        if (round % 4 == 0) {
            sessions.index.view().header->session_count = 0xffffffff;
            CHECK(sessions.index.ensure(sessions.index.view().regions.sessions, kSessionLimit).ok());
        }
        SessionTable successor(sessions.index.view(), reserve_in(sessions.index));
        successor.adopt();
        CHECK(successor.is_known(whole));
        for (const SessionId ended : successor.take_ended()) {
            CHECK(ended != 0 && ended != whole);
            CHECK(successor.forget(ended));
        }
        CHECK(successor.reopen(whole) && successor.charge(whole, {.bytes = 10}));
        if (round % 4 != 0) {
            const SessionId next = value_of(successor.open(1));
            CHECK(next != whole && next != 0);
        }
    }
}

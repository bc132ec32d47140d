// Slots and leases of sessions whose processes end, tested with real processes.
#include <random>
#include <thread>

#include "cache_fixture.hpp"
#include "child_process.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

ChildProcess idle_child() {
    return ChildProcess([](const Line& line) {
        line.await();
        return 0;
    });
}

void end(ChildProcess& child) {
    child.send_signal(SIGKILL);
    child.wait_zombie();
}

// An engine of two processes that holds a lease on keys 0 and 1, and reservations of keys 10 to 12.
struct Engine {
    explicit Engine(SmallCache& of) : cache(of), space(of.open()), session(of.session()) {
        for (ChildProcess* child : {&first, &second}) {
            auto handle = ProcessHandle::open(value_of(identify_process(child->pid())));
            CHECK(cache->sessions().add_member(session, value_of(std::move(handle))).ok());
        }
        CHECK_EQUAL(cache.put(session, space, chain(0, 2)), 2u);
        lease = *cache.take(session, space, chain(0, 2));
        tickets = cache.reserve(session, space, chain(10, 3));
        CHECK_EQUAL(tickets.size(), 3u);
    }
    // Whether everything is still its own, though everybody else takes what they can.
    void check_held(SessionId other) {
        CHECK_EQUAL(cache->reclaim_ended(), 0u);
        for (std::uint64_t prompt = 100; prompt < 110; ++prompt) {
            CHECK(cache.put(other, space, chain(prompt, 200)) > 0);
        }
        CHECK(cache.is_right(lease, space, chain(0, 2)));
        CHECK_EQUAL(cache->stats().reserved, 3u);
        CHECK_EQUAL(cache->stats().leases, 1u);
        CHECK_EQUAL(cache->sessions().held_bytes(session), 5u * 4096);
    }

    SmallCache& cache;
    Space space;
    SessionId session;
    ChildProcess first = idle_child();
    ChildProcess second = idle_child();
    Acquired lease;
    std::vector<Ticket> tickets;
};

}  // namespace

TEST(nothing_is_freed_while_one_process_may_copy) {
    SmallCache cache;
    Engine engine(cache);
    const SessionId other = cache.session();
    engine.check_held(other);
    CHECK(cache->sessions().quarantine(engine.session));
    engine.check_held(other);
    end(engine.first);
    engine.check_held(other);
    engine.second.send_signal(SIGSTOP);
    engine.second.wait_stopped();
    engine.check_held(other);

    end(engine.second);
    CHECK_EQUAL(cache->reclaim_ended(), 1u);
    CHECK_EQUAL(cache->reclaim_ended(), 0u);
    CHECK_EQUAL(cache->stats().leases + cache->stats().reserved, 0u);
    CHECK_EQUAL(cache->stats().sessions, 1u);
    CHECK(!cache->leases().release(engine.session, engine.lease.lease));
    CHECK_EQUAL(cache->reservations().abort(engine.session, engine.tickets), 0u);
    CHECK(value_of(cache->leases().acquire_entries(engine.session, engine.space, chain(0, 1))).outcome ==
          AcquireOutcome::over_limit);
    cache->removals().evict(~0ull);
    CHECK_EQUAL(cache->stats().used_bytes, 0u);

    // The next session in this place has nothing of it.
    const SessionId next = cache.session();
    CHECK_EQUAL(session_place(next), session_place(engine.session));
    CHECK_EQUAL(cache->sessions().held_bytes(next), 0u);
    CHECK_EQUAL(cache->reservations().abort(next, engine.tickets), 0u);
    CHECK_EQUAL(cache.commit(next, engine.space, chain(10, 3), engine.tickets)[0] == CommitOutcome::stale, true);
}

TEST(processes_that_end_without_a_word_are_noticed) {
    SmallCache cache;
    Engine engine(cache);
    end(engine.first);
    end(engine.second);
    CHECK_EQUAL(cache->reclaim_ended(), 1u);
    CHECK_EQUAL(cache->stats().leases + cache->stats().reserved + cache->stats().sessions, 0u);
    CHECK_EQUAL(cache->stats().readable, 2u);
}

TEST(a_quarantined_lease_on_a_forgotten_entry_ends_with_its_processes) {
    SmallCache cache;
    Engine engine(cache);
    CHECK_EQUAL(cache->removals().clear(namespace_of(engine.space)), 2u);
    CHECK_EQUAL(cache->stats().quarantined, 2u);
    CHECK(cache->sessions().quarantine(engine.session));
    CHECK(cache->leases().release(engine.session, engine.lease.lease));  // it may still give back
    CHECK_EQUAL(cache->stats().quarantined, 0u);
    CHECK_EQUAL(cache->reservations().abort(engine.session, std::span(engine.tickets).first(1)), 1u);
    end(engine.first);
    end(engine.second);
    CHECK_EQUAL(cache->reclaim_ended(), 1u);
    CHECK_EQUAL(cache->stats().used_bytes, 0u);
}

TEST(a_session_that_still_holds_something_is_told_again) {
    // The session is charged before its end and gets its lease after it, as if another thread's acquire was under way.
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK(cache->sessions().charge(session, {.bytes = 4096}));
    CHECK(cache->sessions().quarantine(session));
    CHECK_EQUAL(cache->reclaim_ended(), 0u);
    CHECK(cache->sessions().is_known(session));
    CHECK(cache.reserve(session, space, chain(1, 1)).empty());
    cache->sessions().discharge(session, {.bytes = 4096});
    CHECK_EQUAL(cache->reclaim_ended(), 1u);
    CHECK(!cache->sessions().is_known(session));
}

TEST(others_keep_theirs_when_one_session_ends) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId staying = cache.session();
    CHECK_EQUAL(cache.put(staying, space, chain(0, 2)), 2u);
    const auto kept = cache.take(staying, space, chain(0, 2));
    const std::vector<Ticket> kept_tickets = cache.reserve(staying, space, chain(5, 400));
    for (int round = 0; round < 20; ++round) {
        const SessionId ending = cache.session();
        CHECK(cache.take(ending, space, chain(0, 2)).has_value());
        CHECK_EQUAL(cache.reserve(ending, space, chain(6, 500)).size(), 500u);
        CHECK(cache->sessions().quarantine(ending));
        CHECK_EQUAL(cache->reclaim_ended(), 1u);
        CHECK_EQUAL(cache->stats().reserved, 400u);
        CHECK_EQUAL(cache->stats().leases, 1u);
    }
    CHECK_EQUAL(cache->reservations().abort(staying, kept_tickets), 400u);
    CHECK(cache->leases().release(staying, kept->lease));
    CHECK_EQUAL(cache->sessions().held_bytes(staying), 0u);
}

// A session ends while a thread of it still acquires. What was taken back meanwhile belongs to others.
TEST(an_acquire_does_not_touch_what_was_taken_back_from_it) {
    SmallCache cache(small_options(4));
    const Space space = cache.open(plain_geometry(512));
    const SessionId writer = cache.session();
    const SessionId other = cache.session();
    const Hashes hashes = chain(1, 100);
    std::mt19937_64 random(1);
    for (int round = 0; round < 300; ++round) {
        CHECK_EQUAL(cache.put(writer, space, hashes), 100u);
        const SessionId session = cache.session();
        std::atomic<bool> has_begun = false;
        std::jthread acquiring([&] {
            has_begun = true;
            for (int i = 0; i < 3; ++i) {
                if (value_of(cache->leases().acquire_entries(session, space, hashes)).outcome != AcquireOutcome::hit) {
                    break;
                }
            }
        });
        while (!has_begun) {
        }
        for (std::uint64_t pause = random() % 20'000; pause > 0; --pause) {
            std::atomic_signal_fence(std::memory_order_seq_cst);
        }
        CHECK(cache->sessions().quarantine(session));
        cache->reclaim_ended();
        cache->removals().clear(namespace_of(space));
        const std::vector<Ticket> tickets = cache.reserve(other, space, chain(2, 100));
        acquiring.join();
        CHECK_EQUAL(cache->reservations().abort(other, tickets), tickets.size());
        cache->reclaim_ended();
    }
    CHECK_EQUAL(cache->sessions().held_bytes(other), 0u);
}

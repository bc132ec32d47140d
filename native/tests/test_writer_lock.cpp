#include "cache/writer_lock.hpp"

#include <atomic>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace kvo;

TEST(what_is_left_where_nobody_has_the_lock_is_done_at_once) {
    WriterLock lock;
    int made = 0;
    lock.leave([&] { ++made; });
    CHECK_EQUAL(made, 1);
    CHECK(lock.try_lock());
    lock.unlock();
}

TEST(who_leaves_a_call_never_waits_and_the_lock_s_owner_makes_it) {
    WriterLock lock;
    std::vector<int> made;
    lock.lock();
    std::thread([&] {
        for (int call = 0; call < 1000; ++call) {
            lock.leave([&made, call] { made.push_back(call); });
        }
    }).join();
    CHECK(made.empty());
    lock.unlock();
    CHECK_EQUAL(made.size(), 1000u);
    for (int call = 0; call < 1000; ++call) {
        CHECK_EQUAL(made[static_cast<std::size_t>(call)], call);
    }
}

TEST(the_rest_of_a_call_comes_behind_those_that_wait) {
    WriterLock lock;
    std::vector<int> made;
    lock.lock();
    std::thread([&] {
        lock.leave([&] {
            made.push_back(1);
            lock.leave_rest([&] { made.push_back(3); });
        });
        lock.leave([&] { made.push_back(2); });
    }).join();
    lock.unlock();
    CHECK(made == std::vector<int>({1, 2, 3}));
}

TEST(calls_that_are_left_by_many_are_all_made_and_never_two_at_once) {
    constexpr int kCalls = 20000;
    WriterLock lock;
    std::uint64_t made = 0;  // under the lock
    std::atomic<bool> is_over = false;
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 2; ++thread) {
        threads.emplace_back([&] {
            while (!is_over.load()) {
                const std::lock_guard held(lock);
                made += 2;
                made -= 2;
            }
        });
    }
    std::vector<std::thread> leaving;
    for (int thread = 0; thread < 2; ++thread) {
        leaving.emplace_back([&] {
            for (int call = 0; call < kCalls; ++call) {
                lock.leave([&] { ++made; });
            }
        });
    }
    for (std::thread& thread : leaving) {
        thread.join();
    }
    is_over.store(true);
    for (std::thread& thread : threads) {
        thread.join();
    }
    lock.lock();
    lock.unlock();
    CHECK_EQUAL(made, 2u * kCalls);
}

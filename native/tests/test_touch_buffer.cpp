#include "cache/touch_buffer.hpp"

#include <numeric>
#include <thread>

#include "check.hpp"

using namespace kvo;

namespace {

using Touches = std::vector<std::vector<EntryNumber>>;

Touches drain(TouchBuffer& buffer) {
    Touches touches;
    buffer.drain([&](std::span<const EntryNumber> entries) { touches.emplace_back(entries.begin(), entries.end()); });
    return touches;
}

std::vector<EntryNumber> numbers(std::size_t count, EntryNumber first = 0) {
    std::vector<EntryNumber> entries(count);
    std::iota(entries.begin(), entries.end(), first);
    return entries;
}

}  // namespace

TEST(acquires_come_out_as_they_went_in_and_once) {
    TouchBuffer buffer;
    CHECK(drain(buffer).empty());
    const Touches wanted = {{7}, {1, 2, 3}, {3, 2}};
    for (int round = 0; round < 3; ++round) {
        for (const auto& entries : wanted) {
            CHECK(buffer.add(entries));
        }
        CHECK(drain(buffer) == wanted);
        CHECK(drain(buffer).empty());
    }
}

TEST(what_comes_beyond_the_bound_is_refused_and_the_rest_kept) {
    TouchBuffer buffer;
    const auto some = numbers(1000);
    std::size_t added = 0;
    while (buffer.add(some)) {
        added += some.size();
        CHECK(added <= TouchBuffer::kStripeLimit);
    }
    CHECK(added + some.size() > TouchBuffer::kStripeLimit);
    CHECK_EQUAL(buffer.lost(), some.size());
    CHECK(buffer.is_filling());
    std::size_t drained = 0;
    for (const auto& entries : drain(buffer)) {
        CHECK(entries == some);
        drained += entries.size();
    }
    CHECK_EQUAL(drained, added);
    CHECK(!buffer.is_filling());
    CHECK(buffer.add(some));
}

TEST(what_is_drained_in_parts_comes_out_in_its_order_and_once) {
    TouchBuffer buffer;
    Touches wanted;
    for (EntryNumber i = 0; i < 100; ++i) {
        wanted.push_back(numbers(30, i));
        CHECK(buffer.add(wanted.back()));
    }
    Touches drained;
    const auto note = [&](std::span<const EntryNumber> entries) {
        drained.emplace_back(entries.begin(), entries.end());
    };
    for (std::size_t part = 1; part <= 33; ++part) {
        buffer.drain(note, 90);
        CHECK_EQUAL(drained.size(), part * 3);
        CHECK(buffer.is_filling());  // somebody should go on
    }
    CHECK(buffer.add(numbers(5)));
    wanted.push_back(numbers(5));
    buffer.drain(note, 90);
    CHECK(drained == wanted);
    CHECK(!buffer.is_filling());
    CHECK(drain(buffer).empty());
}

TEST(one_acquire_larger_than_the_bound_is_not_lost) {
    TouchBuffer buffer;
    const auto many = numbers(TouchBuffer::kStripeLimit + 1);
    CHECK(buffer.add(many));
    CHECK(!buffer.add(numbers(1)));
    CHECK(drain(buffer) == Touches{many});
}

TEST(threads_lose_nothing_that_was_accepted) {
    constexpr EntryNumber kThreads = 8;
    constexpr EntryNumber kEach = 5000;
    TouchBuffer buffer;
    std::atomic<std::uint64_t> accepted = 0;
    std::atomic<EntryNumber> done = 0;
    std::vector<std::thread> threads;
    for (EntryNumber thread = 0; thread < kThreads; ++thread) {
        threads.emplace_back([&, thread] {
            for (EntryNumber i = 0; i < kEach; ++i) {
                accepted += buffer.add(numbers(2, (thread * kEach + i) * 2));
            }
            ++done;
        });
    }
    std::vector<EntryNumber> last(kThreads, 0);
    std::uint64_t drained = 0;
    const auto drain_all = [&] {
        for (const auto& entries : drain(buffer)) {
            CHECK(entries.size() == 2 && entries[1] == entries[0] + 1);
            EntryNumber& before = last[entries[0] / 2 / kEach];
            CHECK(before == 0 || entries[0] > before);  // a thread's own order
            before = entries[0];
            ++drained;
        }
    };
    while (done != kThreads) {
        drain_all();
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    drain_all();
    CHECK_EQUAL(drained, accepted.load());
}

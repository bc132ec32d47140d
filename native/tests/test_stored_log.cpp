#include "service/stored_log.hpp"

#include <poll.h>

#include <thread>

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

StoredBlocks some_blocks(std::size_t count, std::uint64_t prompt = 1) {
    return {.owner = prompt, .group = 2, .hashes = chain(prompt, count), .parents = parents_of(chain(prompt, count))};
}

bool is_ready(const StoredLog& log) {
    pollfd ready{.fd = log.file(), .events = POLLIN, .revents = 0};
    return poll(&ready, 1, 0) == 1;
}

void check_empty(StoredLog& log) {
    CHECK(!is_ready(log));
    const StoredLog::Taken taken = log.take();
    CHECK(taken.stored.empty());
    CHECK_EQUAL(taken.lost, 0u);
}

}  // namespace

TEST(nothing_is_kept_unless_somebody_wants_to_know) {
    StoredLog log(10);
    CHECK(!log.is_wanted());
    log.add(some_blocks(3));
    check_empty(log);
    log.watch(true);
    CHECK(log.is_wanted());
    check_empty(log);  // what was before is not told
    log.add(some_blocks(3));
    CHECK(is_ready(log));
    log.watch(false);
    CHECK(!log.is_wanted());
    check_empty(log);
    log.add(some_blocks(3));
    log.watch(true);
    check_empty(log);
}

TEST(a_closed_log_keeps_nothing) {
    StoredLog log(10);
    log.watch(true);
    log.add(some_blocks(3));
    log.close();
    CHECK_EQUAL(log.file(), -1);
    log.add(some_blocks(3));
    CHECK(log.take().stored.empty());
    log.close();
}

TEST(batches_come_in_their_order_once) {
    StoredLog log(10);
    log.watch(true);
    log.add(some_blocks(3, 7));
    StoredBlocks orphans = some_blocks(2, 8);
    orphans.parents.clear();
    log.add(orphans);
    log.watch(true);  // again, which changes nothing
    CHECK(is_ready(log));
    const StoredLog::Taken taken = log.take();
    CHECK_EQUAL(taken.stored.size(), 2u);
    CHECK_EQUAL(taken.stored[0].owner, 7u);
    CHECK_EQUAL(taken.stored[0].group, 2u);
    CHECK(taken.stored[0].hashes == chain(7, 3));
    CHECK(taken.stored[0].parents == parents_of(chain(7, 3)));
    CHECK_EQUAL(taken.stored[1].owner, 8u);
    CHECK(taken.stored[1].parents.empty());
    CHECK_EQUAL(taken.lost, 0u);
    check_empty(log);
    log.add(some_blocks(0));  // a batch of which nothing became readable
    check_empty(log);
}

TEST(what_is_beyond_the_limit_is_counted) {
    StoredLog log(10);
    log.watch(true);
    log.add(some_blocks(6));
    log.add(some_blocks(5));  // as a whole
    log.add(some_blocks(4));
    log.add(some_blocks(1));
    const StoredLog::Taken taken = log.take();
    CHECK_EQUAL(taken.stored.size(), 2u);
    CHECK(taken.stored[1].hashes == chain(1, 4));
    CHECK_EQUAL(taken.lost, 6u);
    check_empty(log);
    // There is room again, and one that never fits is told of too.
    log.add(some_blocks(11));
    CHECK(is_ready(log));
    log.add(some_blocks(10));
    const StoredLog::Taken again = log.take();
    CHECK_EQUAL(again.stored.size(), 1u);
    CHECK_EQUAL(again.lost, 11u);
    check_empty(log);
}

TEST(nothing_is_lost_between_writers_and_the_reader) {
    StoredLog log(50);
    log.watch(true);
    constexpr std::size_t kWriters = 4;
    constexpr std::size_t kBatches = 2000;
    std::vector<std::thread> writers;
    for (std::size_t writer = 0; writer < kWriters; ++writer) {
        writers.emplace_back([&log, writer] {
            for (std::size_t i = 0; i < kBatches; ++i) {
                log.add(some_blocks(1 + i % 3, writer));
            }
        });
    }
    std::size_t told = 0;
    std::size_t wanted = 0;
    for (std::size_t i = 0; i < kBatches; ++i) {
        wanted += kWriters * (1 + i % 3);
    }
    while (told < wanted) {
        pollfd ready{.fd = log.file(), .events = POLLIN, .revents = 0};
        CHECK_EQUAL(poll(&ready, 1, -1), 1);
        const StoredLog::Taken taken = log.take();
        told += taken.lost;
        std::size_t kept = 0;
        for (const StoredBlocks& stored : taken.stored) {
            CHECK(stored.hashes == chain(stored.owner, stored.hashes.size() / kHashBytes));
            kept += stored.hashes.size() / kHashBytes;
        }
        CHECK(kept <= 50);
        told += kept;
    }
    for (std::thread& writer : writers) {
        writer.join();
    }
    CHECK_EQUAL(told, wanted);
    check_empty(log);
}

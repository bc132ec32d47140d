#include "cache/cache_memory.hpp"

#include "cache_fixture.hpp"
#include "child_process.hpp"

using namespace kvo;
using namespace kvo::test;

TEST(addresses_count_over_all_segments) {
    SmallCache cache(small_options(2));
    CHECK_EQUAL(cache->memory().bytes_at(0, kSegmentBytes).size(), kSegmentBytes);
    CHECK(cache->memory().bytes_at(kSegmentBytes, 1).data() == cache->memory().segments()[1].bytes().data());
    CHECK(cache->memory().bytes_at(kSegmentBytes - 1, 2).empty());
    CHECK(cache->memory().bytes_at(2 * kSegmentBytes, 1).empty());
    CHECK(cache->memory().bytes_at(~0ull, 1).empty());
    CHECK(cache->memory().bytes_at(1, ~0ull).empty());
}

TEST(files_of_a_living_owner_are_refused) {
    SmallCache cache;
    CacheFiles files = cache.duplicate_files();
    ChildProcess owner([&files](const Line& line) {
        const auto lock = FileLock::adopt(files.lock);
        line.tell(lock.ok() ? 'y' : 'n');
        line.await();
        return 0;
    });
    CHECK_EQUAL(owner.line().await(), 'y');
    const auto refused = CacheCore::adopt(std::move(files), small_options());
    CHECK(refused.fault().code() == Code::unavailable);
    CHECK(refused.fault().message().find(std::to_string(owner.pid())) != std::string::npos);
}

TEST(files_that_do_not_belong_together_are_refused) {
    SmallCache cache(small_options(2));
    CacheFiles fewer = cache.duplicate_files();
    fewer.segments.pop_back();
    CHECK(CacheCore::adopt(std::move(fewer), small_options()).fault().code() == Code::invalid);
    CacheFiles exchanged = cache.duplicate_files();
    std::swap(exchanged.index, exchanged.segments[0]);
    CHECK(CacheCore::adopt(std::move(exchanged), small_options()).fault().code() == Code::invalid);
    CHECK(!CacheCore::adopt(CacheFiles(), small_options()).ok());
    CacheOptions without_policy = small_options(2);
    without_policy.policy = nullptr;
    CHECK(CacheCore::adopt(cache.duplicate_files(), without_policy).fault().code() == Code::invalid);
}

TEST(readers_of_the_index_cannot_write_to_it) {
    SmallCache cache;
    CHECK_EQUAL(fcntl(cache->memory().files().index, F_GETFL) & O_ACCMODE, O_RDONLY);
}

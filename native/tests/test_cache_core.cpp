#include "cache/cache_core.hpp"

#include "cache_fixture.hpp"
#include "child_process.hpp"
#include "made_up_files.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

Status fault_of(const CacheOptions& options) {
    PopulateProgress progress;
    const auto core = CacheCore::create(options, progress);
    return core.ok() ? Status() : core.fault();
}

}  // namespace

TEST(options_that_make_no_cache_are_refused_before_memory_is_taken) {
    std::vector<CacheOptions> refused(11, small_options());
    refused[0].pool_bytes = 0;
    refused[1].entry_limit = 0;
    refused[2].entry_limit = kEntryLimitMax + 1;
    refused[3].segment_bytes = 0;
    refused[4].extent_bytes = 0;
    refused[5].extent_bytes = 100;
    refused[6].extent_bytes = 3 * 4096;
    refused[7].policy = nullptr;
    refused[8].pool_bytes = ~0ull;
    refused[9].segment_bytes = ~0ull;
    refused[10].extent_bytes = 2 * kSegmentBytes;
    for (const CacheOptions& options : refused) {
        const Status status = fault_of(options);
        CHECK(status.code() == Code::invalid);
        CHECK(!status.message().empty() && status.message().find('\n') == std::string::npos);
    }
    CacheOptions too_large = small_options();
    too_large.pool_bytes = 1ull << 55;
    CHECK(fault_of(too_large).code() == Code::unavailable);
    PopulateProgress cancelled;
    cancelled.is_cancelled = true;
    CHECK(CacheCore::create(small_options(), cancelled).fault().code() == Code::failed);
}

TEST(a_new_cache_is_empty_and_as_large_as_was_asked_for) {
    CacheOptions options = small_options();
    options.pool_bytes = 2 * kSegmentBytes - 1;
    SmallCache cache(options);
    const CacheStats stats = cache->stats();
    CHECK_EQUAL(stats.capacity_bytes, 2 * kSegmentBytes);
    CHECK_EQUAL(stats.used_bytes + stats.readable + stats.reserved + stats.quarantined + stats.leases, 0u);
    CHECK_EQUAL(stats.tenants.size(), 1u);
    CHECK(stats.index_bytes > 0 && stats.index_bytes < 4u << 20);
    CHECK_EQUAL(cache->memory().segments().size(), 2u);
    CHECK_EQUAL(cache->memory().files().segments.size(), 2u);
    CHECK_EQUAL(cache->adoption().readable, 0u);
    CHECK_EQUAL(cache->removals().evict(1), 0u);
    CHECK_EQUAL(cache->removals().clear(0), 0u);
    CHECK_EQUAL(cache->reclaim_ended(), 0u);
}

TEST(what_no_waiting_brings_is_refused_at_once_and_what_others_have_is_not) {
    const MadeUpFiles proc("cache_total");
    CacheOptions options = small_options(4);
    options.step_bytes = kSegmentBytes;
    options.populate.proc = proc.root();
    proc.write("meminfo", "MemTotal: 16384 kB\nMemAvailable: 4096 kB");
    CHECK_EQUAL(fault_of(options).message(), "");
    proc.write("meminfo", "MemTotal: 16383 kB\nMemAvailable: 4096 kB");
    CHECK(fault_of(options).code() == Code::unavailable);
    proc.write("meminfo", "MemTotal: 16384 kB\nMemAvailable: 4095 kB");
    CHECK(fault_of(options).code() == Code::unavailable);
}

TEST(a_sparse_cache_may_be_larger_than_the_machine) {
    const MadeUpFiles proc("cache_sparse");
    proc.write("meminfo", "MemTotal: 4096 kB\nMemAvailable: 1024 kB");
    CacheOptions options = small_options(4);
    options.populate.proc = proc.root();
    CHECK(fault_of(options).code() == Code::unavailable);
    options.is_sparse = true;
    SmallCache cache(options);
    CHECK_EQUAL(cache->stats().capacity_bytes, 4 * kSegmentBytes);
    CHECK_EQUAL(cache->memory().ready_bytes(), 4 * kSegmentBytes);
    const SessionId session = cache.session();
    const Space space = cache.open();
    CHECK(cache.put_one(session, space, 1));
    CHECK(cache.is_served(session, space, 1));
    std::uint64_t held = 0;
    for (const Segment& segment : cache->memory().segments()) {
        held += segment.held_bytes();
    }
    CHECK(held > 0 && held < kSegmentBytes);
}

TEST(the_whole_life_under_every_policy) {
    for (const std::string_view policy : policy_names()) {
        SmallCache cache(small_options(2, std::string(policy)));
        const Space space = cache.open(plain_geometry(5000, 2));
        const SessionId session = cache.session();
        for (std::uint64_t round = 0; round < 40; ++round) {
            CHECK_EQUAL(cache.put(session, space, chain(round, 30)), 30u);
            const auto lease = cache.take(session, space, chain(round, 30));
            CHECK(lease && cache->leases().release(session, lease->lease));
        }
        const CacheStats stats = cache->stats();
        CHECK(stats.evicted > 0);
        CHECK_EQUAL(stats.readable + stats.evicted, 1200u);
        CHECK_EQUAL(stats.used_bytes, stats.readable * 10000);
        cache->removals().evict(~0ull);
        CHECK_EQUAL(cache->stats().used_bytes, 0u);
    }
}

TEST(two_namespaces_do_not_see_each_other) {
    SmallCache cache;
    const Space first = cache.open(plain_geometry(), 1);
    const Space second = cache.open(plain_geometry(), 2);
    CHECK(first != second);
    CHECK_EQUAL(cache.open(plain_geometry(), 1), first);
    CHECK(!cache->namespaces().open(fingerprint(1), plain_geometry(5000)).ok());
    const SessionId session = cache.session();
    CHECK(cache.put_one(session, first, 1));
    CHECK(cache.has(first, 1) && !cache.has(second, 1));
    CHECK(cache.put_one(session, second, 1));
    CHECK(cache.is_served(session, first, 1) && cache.is_served(session, second, 1));
    CHECK_EQUAL(cache.count_readable(make_space(4000, 63), chain(1, 3)), 0u);
    CHECK(!cache->namespaces().open(fingerprint(3), plain_geometry(kSegmentBytes, 2)).ok());
}

TEST(records_from_the_smallest_to_a_whole_segment) {
    SmallCache cache(small_options(2));
    const SessionId session = cache.session();
    std::uint8_t name = 0;
    for (const std::uint64_t bytes : {std::uint64_t{1}, std::uint64_t{63}, std::uint64_t{65}, kExtentBytes - 1,
                                      kExtentBytes, kExtentBytes + 1, kSegmentBytes / 2 + 1, kSegmentBytes}) {
        const Space space = cache.open(plain_geometry(bytes), ++name);
        CHECK(cache.put_one(session, space, 1));
        CHECK(cache.put_one(session, space, 2));
        CHECK(cache.is_served(session, space, 1) && cache.is_served(session, space, 2));
    }
}

TEST(a_forked_child_has_no_part_in_the_cache) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK(cache.put_one(session, space, 1));
    const auto lease = cache.take(session, space, chain(1, 1));

    ChildProcess touching([&](const Line&) {
        signal(SIGSEGV, SIG_DFL);
        cache.owner()->version();  // nothing is mapped there
        return 0;
    });
    CHECK_EQUAL(touching.wait_exit(), -SIGSEGV);
    ChildProcess destroying([&](const Line&) {
        cache.owner().reset();
        return 0;
    });
    CHECK_EQUAL(destroying.wait_exit(), 0);

    // The parent goes on, and is the owner still.
    const int lock = cache->memory().files().lock;
    ChildProcess other([lock](const Line&) { return FileLock::adopt(FileDescriptor(lock)).ok() ? 1 : 0; });
    CHECK_EQUAL(other.wait_exit(), 0);
    CHECK(cache.is_right(*lease, space, chain(1, 1)));
    CHECK(cache->leases().release(session, lease->lease));
    CHECK(cache.put_one(session, space, 2) && cache.is_served(session, space, 2));
}

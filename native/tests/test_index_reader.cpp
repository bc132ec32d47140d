#include "cache/index_reader.hpp"

#include <sys/mman.h>

#include <thread>

#include "cache_fixture.hpp"
#include "child_process.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

std::unique_ptr<IndexReader> open_reader(SmallCache& cache) {
    return value_of(IndexReader::open(duplicate(cache->memory().files().index)));
}

std::size_t count_found(const IndexReader& reader, Space space, const Hashes& hashes) {
    std::vector<std::uint8_t> found(hashes.size() / kHashBytes);
    CHECK(reader.lookup(space, hashes, found).ok());
    return static_cast<std::size_t>(std::count(found.begin(), found.end(), 1));
}

}  // namespace

TEST(a_reader_sees_what_is_readable_and_when_it_may_have_changed) {
    SmallCache cache;
    const std::unique_ptr<IndexReader> reader = open_reader(cache);
    const Space space = cache.open();  // after the reader: it learns of it by itself
    const SessionId session = cache.session();
    const Hashes hashes = chain(1, 300);
    std::uint64_t version = reader->version();
    CHECK_EQUAL(count_found(*reader, space, hashes), 0u);
    CHECK_EQUAL(cache.put(session, space, hashes), 300u);
    CHECK(reader->version() != version);
    CHECK_EQUAL(count_found(*reader, space, hashes), 300u);
    CHECK_EQUAL(value_of(reader->find_boundary({.name_space = namespace_of(space), .chain = hashes, .limit = 4000})),
                4000u / 16 * 16);
    version = reader->version();
    CHECK_EQUAL(cache->removals().invalidate(space, hash_at(hashes, 299)), 1u);
    CHECK(reader->version() != version);
    CHECK_EQUAL(count_found(*reader, space, hashes), 299u);
}

TEST(a_reader_sees_how_much_of_the_pool_is_given_away) {
    SmallCache cache;
    const std::unique_ptr<IndexReader> reader = open_reader(cache);
    const Space space = cache.open();
    const SessionId session = cache.session();
    CHECK_EQUAL(reader->used_bytes(), 0u);
    CHECK_EQUAL(cache.put(session, space, chain(1, 30)), 30u);
    CHECK(reader->used_bytes() != 0);
    CHECK_EQUAL(reader->used_bytes(), cache->stats().used_bytes);
    CHECK_EQUAL(cache->removals().invalidate(space, hash_at(chain(1, 30), 29)), 1u);
    CHECK_EQUAL(reader->used_bytes(), cache->stats().used_bytes);
}

// Holes between records of two sizes are free, but no record fits into them.
TEST(a_reader_is_told_that_all_is_given_away_from_the_first_eviction_on_until_much_is_free) {
    SmallCache cache;
    const std::unique_ptr<IndexReader> reader = open_reader(cache);
    const Space large = cache.open(plain_geometry(700'000), 1);
    const Space small = cache.open(plain_geometry(30'000), 2);
    const SessionId session = cache.session();
    CHECK_EQUAL(cache.put(session, large, chain(1, 4)), 4u);
    CHECK_EQUAL(cache.put(session, small, chain(2, 20)), 20u);
    CHECK_EQUAL(cache->stats().evicted, 0u);
    CHECK_EQUAL(reader->used_bytes(), cache->stats().used_bytes);
    CHECK_EQUAL(cache.put(session, large, chain(3, 2)), 2u);
    CHECK(cache->stats().evicted != 0);
    CHECK(cache->stats().used_bytes < reader->ready_bytes() * 31 / 32);
    CHECK_EQUAL(reader->used_bytes(), reader->ready_bytes());
    for (bool is_told = false; !is_told;) {
        CHECK(cache->removals().evict(30'000) != 0);
        const std::uint64_t used = cache->stats().used_bytes;
        is_told = used <= reader->ready_bytes() / 4 * 3;
        CHECK_EQUAL(reader->used_bytes(), is_told ? used : reader->ready_bytes());
    }
}

TEST(questions_that_make_no_sense_are_refused) {
    SmallCache cache;
    const std::unique_ptr<IndexReader> reader = open_reader(cache);
    const Space space = cache.open();
    const Hashes hashes = chain(1, 2);
    std::vector<std::uint8_t> found(3);
    CHECK(reader->lookup(space, hashes, found).code() == Code::invalid);
    const std::uint32_t known = namespace_of(space);
    CHECK(!reader->find_boundary({.name_space = known + 1, .chain = hashes, .limit = 32}).ok());
    CHECK(!reader->find_boundary({.name_space = known, .chain = std::span(hashes).first(33), .limit = 32}).ok());
    CHECK(!reader->find_boundary({.name_space = known, .chain = hashes, .limit = 32, .alignment = 0}).ok());
}

TEST(what_is_no_index_is_refused) {
    SmallCache cache;
    const auto refuses = [](FileDescriptor file) {
        return IndexReader::open(std::move(file)).fault().code() == Code::invalid;
    };
    CHECK(refuses(duplicate(cache->memory().files().lock)));
    CHECK(refuses(FileDescriptor(memfd_create("empty", MFD_CLOEXEC))));
    CHECK(!IndexReader::open(duplicate(cache->memory().files().segments.front())).ok());
}

// Its table grows and its entries come and go while they are read; what stays is always found.
TEST(another_process_reads_beside_the_writer) {
    SmallCache cache;
    const Space space = cache.open();
    const SessionId session = cache.session();
    const Hashes kept = chain(1, 64);
    CHECK_EQUAL(cache.put(session, space, kept), 64u);
    const auto lease = cache.take(session, space, kept);
    CHECK(lease.has_value());
    ChildProcess child([&](const Line& line) {
        const std::unique_ptr<IndexReader> reader = open_reader(cache);
        line.tell();
        for (int round = 0; round < 20000; ++round) {
            if (count_found(*reader, space, kept) != 64) {
                return 1;
            }
        }
        line.tell();
        return 0;
    });
    child.line().await();
    std::jthread writer([&](const std::stop_token& stop) {
        for (std::uint64_t prompt = 2; !stop.stop_requested(); ++prompt) {
            cache.put(session, space, chain(prompt, 100));
        }
    });
    child.line().await();
    writer.request_stop();
    writer.join();
    CHECK_EQUAL(child.wait_exit(), 0);
}

TEST(a_reader_knows_how_much_of_the_memory_is_there) {
    CacheOptions options = small_options(2);
    options.step_bytes = kSegmentBytes / 2;
    SmallCache cache(options, Growth::first_step);
    const std::unique_ptr<IndexReader> reader = open_reader(cache);
    CHECK_EQUAL(reader->ready_bytes(), kSegmentBytes / 2);
    PopulateProgress progress;
    CHECK(value_of(cache->growth().grow(progress)));
    CHECK_EQUAL(reader->ready_bytes(), kSegmentBytes);
    CHECK(cache->growth().grow_fully(progress).ok());
    CHECK_EQUAL(reader->ready_bytes(), 2 * kSegmentBytes);
}

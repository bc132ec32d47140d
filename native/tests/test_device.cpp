#include "disk/device.hpp"

#include <string>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

TEST(what_is_put_is_found_with_its_bytes_digest_and_parent) {
    for (const char* engine : {"auto", "threads"}) {
        DeviceScene scene("device_round");
        scene.terms.io_engine = engine;
        scene.open();
        // Less than a block, more than one, more than a buffer, more than a read, nothing.
        std::uint64_t number = 0;
        for (const std::size_t length : {1, 100, 4096, 5000, 65536, 70000, 200001, 0}) {
            CHECK(scene.put(range(number, 2), length).are_all(DiskOutcome::durable));
            const Records got = scene.get(range(number, 2), length);
            CHECK_EQUAL(got.check_found(), std::size_t{2});
            CHECK_EQUAL(got.batch->item(1).digest, digest_of(number + 1, length));
            CHECK_EQUAL(int{got.batch->item(1).parent[5]}, static_cast<int>(number + 1));
            number += 2;
        }
        CHECK(scene.get({999}, 100).are_all(DiskOutcome::missing));
        CHECK(scene.get({0}, 2).are_all(DiskOutcome::missing));  // of another length
        CHECK(scene.device->contains(mark_of(key_of(3))));
        CHECK(!scene.device->contains(mark_of(key_of(999))));
        CHECK(scene.close());
    }
}

TEST(a_record_is_one_key_with_all_its_parts) {
    DeviceScene scene("device_keys");
    scene.open();
    scene.put({1}, 500);
    const auto get_as = [&](auto change) {
        Records records = make_records(DiskVerb::get, {1}, 500);
        change(records.batch->item(0).key);
        scene.run(records);
        return records.outcome();
    };
    CHECK(get_as([](RecordKey&) {}) == DiskOutcome::found);
    CHECK(get_as([](RecordKey& key) { key.fingerprint[31] ^= 1; }) == DiskOutcome::missing);
    CHECK(get_as([](RecordKey& key) { key.block_hash[31] ^= 1; }) == DiskOutcome::missing);
    CHECK(get_as([](RecordKey& key) { ++key.group; }) == DiskOutcome::missing);
    CHECK(get_as([](RecordKey& key) { ++key.shard; }) == DiskOutcome::missing);
}

TEST(a_record_that_was_damaged_in_memory_is_never_written) {
    DeviceScene scene("device_memory");
    scene.open();
    const Records records = make_records(DiskVerb::put, range(0, 3), 100000, true);
    records.batch->item(1).address[77777] ^= std::byte{4};
    scene.run(records);
    CHECK(records.outcome(0) == DiskOutcome::durable);
    CHECK(records.outcome(1) == DiskOutcome::damaged);
    CHECK(records.outcome(2) == DiskOutcome::durable);
    CHECK_EQUAL(scene.health().counts.damaged_records, std::uint64_t{1});
    CHECK_EQUAL(scene.get(range(0, 3), 100000).check_found(), std::size_t{2});
    scene.reopen();
    const Records got = scene.get(range(0, 3), 100000);
    CHECK_EQUAL(got.check_found(), std::size_t{2});
    CHECK(got.outcome(1) == DiskOutcome::missing);
}

TEST(what_is_there_is_not_written_again) {
    DeviceScene scene("device_again");
    scene.open();
    scene.put(range(0, 4), 30000, false);
    const std::uint64_t written = scene.health().counts.put_records;
    CHECK(scene.put(range(0, 4), 30000, false).are_all(DiskOutcome::written));
    CHECK(scene.put(range(0, 4), 30000, true).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.health().counts.put_records, written);
}

TEST(neighbours_are_read_together) {
    DeviceScene scene("device_merge");
    scene.open();
    scene.put(range(0, 32), 3000);
    int reads = 0;
    scene.plan->set([&reads](const IoRequest& request) {
        reads += request.kind == IoKind::read ? 1 : 0;
        return IoFault{};
    });
    // 32 records of 3200 bytes with their headers, by reads of 64 KiB.
    CHECK_EQUAL(scene.get(range(0, 32), 3000).check_found(), std::size_t{32});
    CHECK_EQUAL(reads, 2);
}

TEST(what_was_written_is_found_by_the_next_one) {
    DeviceScene scene("device_reopen");
    scene.open();
    scene.put(range(0, 200), 9000);
    CHECK(scene.health().segments > 1);
    const DeviceHealth before = scene.health();
    scene.reopen();
    const DeviceHealth health = scene.health();
    CHECK_EQUAL(health.records, std::uint64_t{200});
    CHECK_EQUAL(health.live_bytes, before.live_bytes);
    CHECK_EQUAL(health.counts.recovered_records, std::uint64_t{200});
    CHECK_EQUAL(health.counts.scanned_segments, std::uint64_t{0});  // all had their footers
    CHECK_EQUAL(scene.get(range(0, 200), 9000).check_found(), std::size_t{200});
}

TEST(what_was_removed_stays_so) {
    DeviceScene scene("device_remove");
    scene.open();
    scene.put(range(0, 10), 9000);
    const Records removed = scene.remove({3, 4, 77});
    CHECK(removed.outcome(0) == DiskOutcome::removed && removed.outcome(1) == DiskOutcome::removed);
    CHECK(removed.outcome(2) == DiskOutcome::missing);
    CHECK(scene.get({3}, 9000).are_all(DiskOutcome::missing));
    scene.put({4}, 9000);  // and is there again
    scene.reopen();
    CHECK(scene.get({3}, 9000).are_all(DiskOutcome::missing));
    CHECK_EQUAL(scene.get({0, 4, 9}, 9000).check_found(), std::size_t{3});
}

TEST(a_removal_lives_as_long_as_what_it_removes) {
    DeviceScene scene("device_removal_moves");
    scene.terms.move_share = 1.0;
    scene.open();
    scene.put(range(0, 40), 20000);  // the first segment, and a bit of the next
    scene.remove({1});
    // The segment with the removal goes, over and over, and the first one is kept as all of it is read.
    for (std::uint64_t number = 100; number < 1000; number += 20) {
        scene.put(range(number, 20), 20000);
        scene.get(range(2, 38), 20000);
    }
    CHECK(scene.health().counts.evicted_segments > 8);
    scene.reopen();
    CHECK(scene.get({1}, 20000).are_all(DiskOutcome::missing));
}

TEST(the_capacity_is_kept_and_the_oldest_goes) {
    DeviceScene scene("device_evict");
    scene.open();
    for (std::uint64_t number = 0; number < 2000; number += 50) {
        CHECK(scene.put(range(number, 50), 20000, false).are_all(DiskOutcome::written));
    }
    const DeviceHealth health = scene.health();
    CHECK(health.segments <= 8);
    CHECK(health.counts.evicted_records > 1000);
    CHECK(scene.get({0}, 20000).are_all(DiskOutcome::missing));
    CHECK_EQUAL(scene.get(range(1950, 50), 20000).check_found(), std::size_t{50});
    std::uintmax_t bytes = 0;
    for (const auto& entry : std::filesystem::directory_iterator(scene.folder.root())) {
        bytes += entry.file_size();
    }
    CHECK(bytes <= scene.terms.capacity_bytes + 8192);  // with lock, identity and probe
    scene.reopen();
    CHECK_EQUAL(scene.get(range(1950, 50), 20000).check_found(), std::size_t{50});
}

TEST(what_is_hot_is_kept_and_writes_stay_in_proportion) {
    DeviceScene scene("device_hot");
    scene.open();
    scene.put(range(0, 3), 20000);
    std::size_t kept = 0;
    for (std::uint64_t number = 100; number < 4000; number += 25) {
        scene.put(range(number, 25), 20000, false);
        kept = scene.get(range(0, 3), 20000).check_found();
    }
    CHECK_EQUAL(kept, std::size_t{3});
    const DeviceCounts counts = scene.health().counts;
    CHECK(counts.evicted_segments > 50);
    CHECK(counts.moved_bytes > 0);
    CHECK(static_cast<double>(counts.written_bytes) <= 1.2 * static_cast<double>(counts.put_bytes));
}

TEST(all_that_is_hot_is_more_than_may_be_written_again) {
    DeviceScene scene("device_all_hot");
    scene.open();
    for (std::uint64_t number = 0; number < 3000; number += 25) {
        scene.put(range(number, 25), 20000, false);
        scene.get(range(number, 25), 20000);
    }
    const DeviceCounts counts = scene.health().counts;
    CHECK(counts.moved_bytes > 0);
    CHECK(static_cast<double>(counts.written_bytes) <= 1.2 * static_cast<double>(counts.put_bytes));
}

TEST(puts_that_come_faster_than_moves_do_not_take_their_room) {
    DeviceScene scene("device_room");
    scene.terms.move_share = 1.0;
    scene.terms.segment_bytes = 12 * kSmallSegment;  // so much that moves come in several parts
    scene.terms.capacity_bytes = 5 * scene.terms.segment_bytes;
    scene.open();
    for (std::uint64_t first = 0; first < 2000; first += 1000) {
        scene.put(range(first, 300), 100000, false);
        scene.get(range(first, 300), 100000);
        CHECK(scene.put(range(first + 300, 700), 100000, false).are_all(DiskOutcome::written));
    }
    CHECK(scene.health().counts.moved_bytes > 0);
}

TEST(a_smaller_capacity_takes_files_away) {
    DeviceScene scene("device_smaller");
    scene.open();
    scene.put(range(0, 300), 20000, false);
    CHECK(scene.close());
    scene.terms.capacity_bytes = 4 * kSmallSegment;
    scene.open();
    CHECK(scene.health().segments <= 4);
    CHECK(!std::filesystem::exists(scene.segment_path(4)));
    CHECK(scene.health().counts.dropped_segments > 0);
    scene.put(range(1000, 100), 20000);
    CHECK_EQUAL(scene.get(range(1090, 10), 20000).check_found(), std::size_t{10});
}

TEST(records_that_no_segment_takes_are_refused) {
    DeviceScene scene("device_large");
    scene.open();
    CHECK(scene.put({1}, (512 << 10) + 1).are_all(DiskOutcome::too_large));
    CHECK(scene.put({2}, 512 << 10).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.get({2}, 512 << 10).check_found(), std::size_t{1});
}

TEST(todays_bytes_are_bounded) {
    DeviceScene scene("device_budget");
    scene.terms.daily_bytes = std::uint64_t{24} << 20;  // a MiB an hour
    scene.open();
    const Records records = scene.put(range(0, 100), 20000, false);
    std::size_t written = 0;
    for (std::size_t i = 0; i < 100; ++i) {
        written += records.outcome(i) == DiskOutcome::written ? 1 : 0;
        CHECK(records.outcome(i) == DiskOutcome::written || records.outcome(i) == DiskOutcome::over_budget);
    }
    CHECK(written > 40 && written < 60);
    const DeviceCounts counts = scene.health().counts;
    CHECK_EQUAL(counts.over_budget_records, 100 - written);
    CHECK(counts.written_bytes < (std::uint64_t{1} << 20) + (128 << 10));
    scene.reopen();  // no way around it
    CHECK(scene.put({500}, 20000).are_all(DiskOutcome::over_budget));
    CHECK(scene.get({0}, 20000).check_found() == 1);
}

TEST(terms_that_cannot_be_kept_are_refused_in_words) {
    const auto why = [](auto change) {
        DeviceTerms terms = small_terms("there");
        change(terms);
        const Status status = check_terms(terms);
        CHECK(status.ok() || status.code() == Code::invalid);
        return status.message();
    };
    CHECK(why([](DeviceTerms&) {}).empty());
    CHECK(why([](DeviceTerms& terms) { terms.path.clear(); }).find("folder") != std::string::npos);
    CHECK(why([](DeviceTerms& terms) { terms.segment_bytes = 5000; }).find("multiple of 4096") != std::string::npos);
    CHECK(why([](DeviceTerms& terms) { terms.capacity_bytes = 3 << 20; }).find("4 segments") != std::string::npos);
    CHECK(why([](DeviceTerms& terms) { terms.write_depth = 16; }).find("io_depth") != std::string::npos);
    CHECK(why([](DeviceTerms& terms) { terms.move_share = 2; }).find("move_share") != std::string::npos);
    CHECK(why([](DeviceTerms& terms) { terms.record_limit_bytes = 0; }).find("record_limit") != std::string::npos);
    CHECK(why([](DeviceTerms& terms) { terms.read_piece_bytes = 100; }).find("read_piece") != std::string::npos);
}

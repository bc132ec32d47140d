// How a device acts when its file system fails, and how it comes back.
#include <fcntl.h>
#include <unistd.h>

#include <string>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

bool is_state(const DeviceScene& scene, DeviceState state) { return scene.health().state == state; }

// Nothing that is found is wrong, and what was durable is found.
void check_all_found(const DeviceScene& scene, const std::vector<std::uint64_t>& numbers, std::size_t length) {
    CHECK_EQUAL(scene.get(numbers, length).check_found(), numbers.size());
}

}  // namespace

TEST(short_reads_and_writes_change_nothing) {
    DeviceScene scene("faults_short");
    scene.plan->set([](const IoRequest& request) {
        return request.length > 2 * kIoAlignment ? IoFault{IoFault::Kind::cut, 0, request.length / 2} : IoFault{};
    });
    scene.open();
    CHECK(scene.put(range(0, 20), 50000).are_all(DiskOutcome::durable));
    check_all_found(scene, range(0, 20), 50000);
    scene.reopen();
    check_all_found(scene, range(0, 20), 50000);
}

TEST(a_write_that_fails_makes_it_read_only_until_a_probe_succeeds) {
    for (const int error : {ENOSPC, EIO, EROFS}) {
        DeviceScene scene("faults_write");
        scene.open();
        scene.put(range(0, 10), 20000);
        fail_kind(*scene.plan, IoKind::write, error);
        const Records lost = scene.put(range(50, 5), 20000);
        CHECK(lost.are_all(DiskOutcome::failed));
        CHECK(!scene.device->contains(mark_of(key_of(50))));
        check_all_found(scene, range(0, 10), 20000);
        // The folder itself can be written to, so the next probe brings it back; a write fails again.
        scene.step_until([&] { return is_state(scene, DeviceState::ready); });
        CHECK(scene.put({51}, 20000).are_all(DiskOutcome::failed));
        scene.plan->set({});
        scene.step_until([&] { return is_state(scene, DeviceState::ready); });
        CHECK(scene.health().reason.empty());
        CHECK(scene.put(range(50, 5), 20000).are_all(DiskOutcome::durable));
        scene.reopen();
        check_all_found(scene, range(0, 10), 20000);
        check_all_found(scene, range(50, 5), 20000);
    }
}

TEST(the_reason_is_one_line_with_the_file_and_the_error) {
    DeviceScene scene("faults_reason");
    scene.terms.probe_interval = 1h;
    scene.open();
    scene.put({1}, 100);
    fail_kind(*scene.plan, IoKind::write, EIO);
    scene.put({2}, 100);
    const DeviceHealth health = scene.health();
    CHECK(health.state == DeviceState::read_only);
    CHECK_EQUAL(health.reason,
                "disk folder " + scene.folder.root().string() + ": segment-000000: write: Input/output error");
    CHECK(health.counts.io_errors > 0);
    CHECK(scene.put({3}, 100).are_all(DiskOutcome::unavailable));
    CHECK(scene.remove({1}).are_all(DiskOutcome::unavailable));
    CHECK_EQUAL(scene.get({1}, 100).check_found(), std::size_t{1});
}

TEST(a_failed_fdatasync_drops_what_came_since_the_last_good_one) {
    DeviceScene scene("faults_sync");
    scene.terms.probe_interval = 1h;
    scene.terms.sync_interval = 1h;
    scene.open();
    CHECK(scene.put(range(0, 5), 20000).are_all(DiskOutcome::durable));
    CHECK(scene.put(range(10, 5), 20000, false).are_all(DiskOutcome::written));
    check_all_found(scene, range(10, 5), 20000);
    fail_kind(*scene.plan, IoKind::sync, EIO);
    CHECK(scene.put(range(20, 5), 20000).are_all(DiskOutcome::failed));
    CHECK(is_state(scene, DeviceState::read_only));
    CHECK(scene.get(range(10, 5), 20000).are_all(DiskOutcome::missing));
    CHECK(scene.get(range(20, 5), 20000).are_all(DiskOutcome::missing));
    check_all_found(scene, range(0, 5), 20000);
}

TEST(a_read_that_fails_is_a_miss_and_none_that_succeeds_a_device_that_has_gone) {
    DeviceScene scene("faults_read");
    scene.open();
    scene.put(range(0, 10), 20000);
    fail_kind(*scene.plan, IoKind::read, EIO);
    CHECK(scene.get({0}, 20000).are_all(DiskOutcome::failed));
    scene.step_until([&] { return is_state(scene, DeviceState::absent); });  // it asked for more by itself
    CHECK(is_state(scene, DeviceState::absent));
    CHECK(scene.get({1}, 20000).are_all(DiskOutcome::unavailable));
    CHECK(!scene.device->contains(mark_of(key_of(1))));
    CHECK(scene.health().reason.find("Input/output error") != std::string::npos ||
          scene.health().reason.find("reads fail") != std::string::npos);
    scene.plan->set({});
    scene.step_until([&] { return is_state(scene, DeviceState::ready); });
    check_all_found(scene, range(0, 10), 20000);
}

TEST(a_hang_hits_the_deadline_and_its_memory_is_left_alone) {
    DeviceScene scene("faults_hang");
    scene.terms.read_buffers = 2;
    scene.open();
    scene.put(range(0, 4), 20000);
    scene.plan->set([](const IoRequest& request) {
        return request.kind == IoKind::read ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    const auto late = [&](std::uint64_t number) {
        Records records = make_records(DiskVerb::get, {number}, 20000, false, std::chrono::steady_clock::now() + 20ms);
        scene.run(records);
        return records.outcome() == DiskOutcome::late;
    };
    CHECK(late(0) && late(1));
    // Both buffers hang. A new request finds none, and ends by its deadline, which its caller watches.
    Records waiting = make_records(DiskVerb::get, {2}, 20000);
    scene.start(waiting);
    scene.device->step();
    waiting.batch->expire();
    CHECK(waiting.are_all(DiskOutcome::late));
    CHECK(scene.put({9}, 20000).are_all(DiskOutcome::durable));  // writes have memory of their own
    scene.plan->set({});
    scene.plan->release();
    check_all_found(scene, range(0, 4), 20000);
}

TEST(a_record_whose_caller_has_gone_is_not_touched) {
    DeviceScene scene("faults_late");
    scene.open();
    scene.put({1}, 20000);
    Records records = make_records(DiskVerb::get, {1}, 20000);
    scene.start(records);
    records.batch->expire();
    for (int i = 0; i < 20; ++i) {
        scene.device->step();
        wait_readable(scene.device->file(), 1);
    }
    CHECK(records.are_all(DiskOutcome::late));
    CHECK(records.memory[0] == std::vector<std::byte>(20000));
}

TEST(a_write_that_hangs_is_a_failed_device_and_memory_that_comes_back) {
    DeviceScene scene("faults_write_hang");
    scene.terms.io_timeout = 2s;
    scene.open();
    scene.put({1}, 100);
    scene.plan->set([](const IoRequest& request) {
        return request.kind == IoKind::write ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    CHECK(scene.put({2}, 100).are_all(DiskOutcome::failed));
    check_all_found(scene, {1}, 100);
    scene.plan->set({});
    scene.plan->release();
    scene.step_until([&] { return is_state(scene, DeviceState::ready); });
    CHECK(scene.put({2}, 100).are_all(DiskOutcome::durable));
    CHECK(scene.close());
}

TEST(an_fdatasync_that_hangs_is_a_failed_one) {
    DeviceScene scene("faults_sync_hang");
    scene.terms.io_timeout = 200ms;
    scene.open();
    scene.put({1}, 100);
    scene.plan->set([](const IoRequest& request) {
        return request.kind == IoKind::sync ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    CHECK(scene.put({2}, 100).are_all(DiskOutcome::failed));
    check_all_found(scene, {1}, 100);
    scene.plan->set({});
    scene.plan->release();
    scene.step_until([&] { return is_state(scene, DeviceState::ready); });
    CHECK(scene.put({2}, 100).are_all(DiskOutcome::durable));
}

TEST(a_fault_that_no_probe_sees_is_tried_less_and_less_often) {
    DeviceScene scene("faults_flapping");
    Instant clock = std::chrono::steady_clock::now();
    scene.terms.now = [&clock] { return clock; };
    scene.terms.probe_interval = 2s;
    scene.open();
    const auto put = [&](std::uint64_t number) {
        const Records records = make_records(DiskVerb::put, {number}, 100, true, clock + 1h);
        scene.run(records);
        return records.outcome();
    };
    CHECK(put(1) == DiskOutcome::durable);
    fail_kind(*scene.plan, IoKind::write, EIO);
    std::uint64_t flips = 0;
    for (const Instant end = clock + 600s; clock < end; clock += 1s) {
        if (is_state(scene, DeviceState::ready)) {
            ++flips;
            CHECK(put(2) == DiskOutcome::failed);
        }
    }
    CHECK(flips >= 8 && flips <= 16);  // not 300
    scene.plan->set({});
    clock += 60s;
    CHECK(is_state(scene, DeviceState::ready));
    CHECK(put(2) == DiskOutcome::durable);
    // Once it has been well for a minute, it is tried as soon as at first.
    clock += 61s;
    fail_kind(*scene.plan, IoKind::write, EIO);
    CHECK(put(3) == DiskOutcome::failed);
    clock += 2s;
    CHECK(is_state(scene, DeviceState::ready));
}

TEST(a_file_cut_short_from_outside_is_a_miss_and_the_rest_goes_on) {
    DeviceScene scene("faults_truncated");
    scene.open();
    scene.put(range(0, 120), 20000);
    CHECK_EQUAL(truncate(scene.segment_path(0).c_str(), 4096), 0);
    const Records got = scene.get(range(0, 120), 20000);
    const std::size_t found = got.check_found();
    CHECK(found < 120 && found > 60);
    CHECK(got.outcome(0) == DiskOutcome::failed);
    CHECK(scene.get({0}, 20000).are_all(DiskOutcome::missing));
    CHECK(scene.put({0}, 20000).are_all(DiskOutcome::durable));
    scene.reopen();
    CHECK_EQUAL(scene.health().counts.dropped_segments, std::uint64_t{1});
    CHECK_EQUAL(scene.get(range(0, 120), 20000).check_found(), found + 1);
}

TEST(a_file_overwritten_from_outside_is_damaged_and_gone) {
    DeviceScene scene("faults_overwritten");
    scene.open();
    scene.put(range(0, 10), 20000);
    const FileDescriptor file(open(scene.segment_path(0).c_str(), O_WRONLY | O_CLOEXEC));
    const std::string noise(30000, 'x');
    CHECK_EQUAL(pwrite(file.number(), noise.data(), noise.size(), 50000), ssize_t{30000});
    const Records got = scene.get(range(0, 10), 20000);
    CHECK(got.check_found() >= 7);
    CHECK(got.outcome(3) == DiskOutcome::damaged);
    CHECK(scene.get({3}, 20000).are_all(DiskOutcome::missing));
    CHECK(scene.health().counts.damaged_records > 0);
}

TEST(a_folder_that_goes_is_absent_and_comes_back_by_itself) {
    DeviceScene scene("faults_gone");
    scene.open();
    scene.put(range(0, 10), 20000);
    const std::filesystem::path root = scene.folder.root(), aside = root.string() + "_aside";
    std::filesystem::rename(root, aside);
    std::filesystem::create_directory(root);  // as the empty folder under a mount that has gone
    CHECK_EQUAL(chmod(root.c_str(), 0700), 0);
    scene.step_until([&] { return is_state(scene, DeviceState::absent); });
    CHECK(scene.get({1}, 20000).are_all(DiskOutcome::unavailable));
    for (int i = 0; i < 5; ++i) {
        CHECK(is_state(scene, DeviceState::absent));  // and no new store is made there
    }
    CHECK(!std::filesystem::exists(root / "identity"));
    CHECK(!scene.health().reason.empty());
    std::filesystem::remove_all(root);
    std::filesystem::rename(aside, root);
    scene.step_until([&] { return is_state(scene, DeviceState::ready); });
    check_all_found(scene, range(0, 10), 20000);
}

TEST(a_folder_that_others_may_enter_is_left_alone_until_they_may_not) {
    DeviceScene scene("faults_owner");
    scene.open();
    scene.put(range(0, 10), 20000);
    const auto comes_and_goes = [&scene](auto spoil, auto mend, const std::string& reason) {
        CHECK_EQUAL(spoil(scene.folder.root().c_str()), 0);
        scene.step_until([&] { return is_state(scene, DeviceState::absent); });
        CHECK(scene.health().reason.find(reason) != std::string::npos);
        CHECK_EQUAL(mend(scene.folder.root().c_str()), 0);
        scene.step_until([&] { return is_state(scene, DeviceState::ready); });
        check_all_found(scene, range(0, 10), 20000);
    };
    comes_and_goes([](const char* path) { return chmod(path, 0750); },
                   [](const char* path) { return chmod(path, 0700); }, "its mode must be 0700");
    if (geteuid() == 0) {  // nobody else can give a folder away
        comes_and_goes([](const char* path) { return chown(path, 12345, 0); },
                       [](const char* path) { return chown(path, 0, 0); }, "belongs to user 12345");
    }
}

TEST(a_second_server_is_refused_and_gets_in_when_the_first_one_ends) {
    DeviceScene scene("faults_second");
    scene.open();
    scene.put({1}, 100);
    const std::unique_ptr<Device> second = make_device(small_terms(scene.folder.root().string()));
    second->step();
    CHECK(second->health().state == DeviceState::absent);
    CHECK(second->health().reason.find("another server uses it") != std::string::npos);
    CHECK_EQUAL(scene.get({1}, 100).check_found(), std::size_t{1});
    CHECK(scene.close());
    second->step();
    CHECK(second->health().state == DeviceState::ready);
    CHECK(second->contains(mark_of(key_of(1))));
    CHECK(second->close(60000));
}

TEST(what_was_not_sealed_is_found_by_its_records) {
    DeviceScene scene("faults_unsealed");
    scene.open();
    scene.put(range(0, 30), 20000);
    scene.remove({7});
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.health().counts.scanned_segments, std::uint64_t{1});
    CHECK(scene.get({7}, 20000).are_all(DiskOutcome::missing));
    CHECK_EQUAL(scene.get(range(0, 30), 20000).check_found(), std::size_t{29});
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.health().counts.scanned_segments, std::uint64_t{0});  // it got a footer meanwhile
    CHECK_EQUAL(scene.get(range(0, 30), 20000).check_found(), std::size_t{29});
}

TEST(bytes_of_an_older_life_are_never_taken_for_new_ones) {
    DeviceScene scene("faults_older");
    scene.open();
    // All segments are used several times, so behind what is written now lie whole records of before.
    for (std::uint64_t number = 0; number < 1000; number += 25) {
        scene.put(range(number, 25), 20000);
    }
    const std::uint64_t records = scene.health().records;
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.health().records, records);
    const Records got = scene.get(range(0, 1000), 20000);
    CHECK_EQUAL(got.check_found(), std::size_t{records});
}

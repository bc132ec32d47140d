// Records that are damaged or cannot be read: given up, once and for all, and nothing else with them.
#include <fcntl.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kLength = 20000;

std::uint64_t offset_of(const DeviceScene& scene, std::uint64_t number) {
    for (const FooterEntry& entry : scene.device->list_segment(0)) {
        if (entry.key == key_of(number)) {
            return entry.offset;
        }
    }
    throw std::runtime_error("no such record in the first segment");
}

void damage(const DeviceScene& scene, std::uint64_t number) {
    const FileDescriptor file(open(scene.segment_path(0).c_str(), O_WRONLY | O_CLOEXEC));
    const auto at = static_cast<off_t>(offset_of(scene, number) + kRecordHeaderBytes + 5);
    CHECK_EQUAL(pwrite(file.number(), "xx", 2, at), ssize_t{2});
}

bool is_of_segment(const IoRequest& request, std::uint32_t number) {
    const auto link = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(request.file));
    return link.filename() == segment_file_name(number);
}

// The place of a medium that is worn out.
struct BadPlace {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
    bool is_in(const IoRequest& request) const {
        return request.kind == IoKind::read && request.offset < end && request.offset + request.length > begin;
    }
};

BadPlace wear_out(const DeviceScene& scene, std::uint64_t number) {
    const std::uint64_t at = offset_of(scene, number) + kLength / 2;
    const BadPlace place{at, at + 1};
    scene.plan->set([place](const IoRequest& request) {
        return place.is_in(request) && is_of_segment(request, 0) ? IoFault{IoFault::Kind::error, EIO, 0} : IoFault{};
    });
    return place;
}

}  // namespace

TEST(a_damaged_record_is_not_back_after_a_restart) {
    DeviceScene scene("losses_damaged");
    scene.open();
    scene.put(range(0, 10), kLength);
    damage(scene, 3);
    CHECK(scene.get({3}, kLength).are_all(DiskOutcome::damaged));
    scene.reopen();
    CHECK(!scene.device->contains(mark_of(key_of(3))));
    CHECK_EQUAL(scene.get(range(0, 10), kLength).check_found(), std::size_t{9});
    CHECK_EQUAL(scene.health().counts.damaged_records, std::uint64_t{0});
}

TEST(what_is_put_in_its_place_stays) {
    DeviceScene scene("losses_again");
    scene.open();
    scene.put(range(0, 10), kLength);
    damage(scene, 3);
    CHECK(scene.get({3}, kLength).are_all(DiskOutcome::damaged));
    CHECK(scene.put({3}, kLength).are_all(DiskOutcome::durable));
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.get(range(0, 10), kLength).check_found(), std::size_t{10});
}

TEST(a_loss_that_cannot_be_written_now_is_written_later) {
    DeviceScene scene("losses_later");
    Instant clock = std::chrono::steady_clock::now();
    scene.terms.now = [&clock] { return clock; };
    scene.terms.probe_interval = 2s;
    scene.open();
    scene.put(range(0, 10), kLength);
    damage(scene, 3);
    fail_kind(*scene.plan, IoKind::write, EIO);
    CHECK(scene.put({20}, kLength).are_all(DiskOutcome::failed));
    CHECK(scene.health().state == DeviceState::read_only);
    CHECK(scene.get({3}, kLength).are_all(DiskOutcome::damaged));
    scene.plan->set({});
    clock += 2s;
    scene.step_until([&] { return scene.health().state == DeviceState::ready; });
    CHECK(scene.put({20}, kLength).are_all(DiskOutcome::durable));  // and so is what was written before it
    scene.drop();
    scene.open();
    CHECK(!scene.device->contains(mark_of(key_of(3))));
    CHECK_EQUAL(scene.get(range(0, 10), kLength).check_found(), std::size_t{9});
}

TEST(a_record_that_cannot_be_read_goes_alone_and_for_good) {
    DeviceScene scene("losses_unreadable");
    scene.open();
    scene.put(range(0, 10), kLength);
    wear_out(scene, 3);
    const Records got = scene.get(range(0, 10), kLength);
    CHECK_EQUAL(got.check_found(), std::size_t{9});
    CHECK(got.outcome(3) == DiskOutcome::failed);
    for (int i = 0; i < 20; ++i) {
        CHECK(scene.get({3}, kLength).are_all(DiskOutcome::missing));
    }
    CHECK(scene.health().state == DeviceState::ready);
    CHECK_EQUAL(scene.health().counts.unreadable_records, std::uint64_t{1});
    scene.plan->set({});
    scene.reopen();
    CHECK(!scene.device->contains(mark_of(key_of(3))));
    CHECK_EQUAL(scene.get(range(0, 10), kLength).check_found(), std::size_t{9});
}

TEST(who_asks_for_it_alone_learns_no_less) {
    DeviceScene scene("losses_alone");
    scene.open();
    scene.put(range(0, 10), kLength);
    wear_out(scene, 3);
    CHECK(scene.get({3}, kLength).are_all(DiskOutcome::failed));
    scene.step_until([&] { return scene.health().counts.unreadable_records == 1; });
    CHECK(scene.put({20}, kLength).are_all(DiskOutcome::durable));
    scene.plan->set({});
    scene.drop();
    scene.open();
    CHECK(!scene.device->contains(mark_of(key_of(3))));
    CHECK_EQUAL(scene.get(range(0, 10), kLength).check_found(), std::size_t{9});
}

TEST(a_device_that_cannot_be_read_at_all_has_lost_no_record) {
    DeviceScene scene("losses_none");
    scene.open();
    scene.put(range(0, 20), kLength);
    fail_kind(*scene.plan, IoKind::read, EIO);
    scene.get(range(0, 20), kLength);
    scene.step_until([&] { return scene.health().state == DeviceState::absent; });
    scene.plan->set({});
    scene.step_until([&] { return scene.health().state == DeviceState::ready; });
    CHECK_EQUAL(scene.health().counts.unreadable_records, std::uint64_t{0});
    scene.reopen();
    CHECK_EQUAL(scene.get(range(0, 20), kLength).check_found(), std::size_t{20});
}

TEST(what_fails_late_does_not_keep_a_device_away) {
    DeviceScene scene("losses_late");
    scene.open();
    scene.put(range(0, 20), kLength);
    const std::uint64_t first = offset_of(scene, 0);
    scene.plan->set([first](const IoRequest& request) {
        if (request.kind != IoKind::read) {
            return IoFault{};
        }
        const bool is_first = request.offset <= first && request.offset + request.length > first + kLength;
        return IoFault{is_first ? IoFault::Kind::hang : IoFault::Kind::error, EIO, 0};
    });
    const Records hung = make_records(DiskVerb::get, {0, 1}, kLength);
    scene.start(hung);
    scene.get({10}, kLength);
    scene.step_until([&] { return scene.health().state == DeviceState::absent; });
    scene.plan->release();
    scene.step_until([&] { return hung.batch->has_ended(); });
    CHECK(hung.are_all(DiskOutcome::failed));
    scene.plan->set({});
    scene.step_until([&] { return scene.health().state == DeviceState::ready; });
    CHECK_EQUAL(scene.health().counts.unreadable_records, std::uint64_t{0});
    CHECK_EQUAL(scene.get(range(0, 20), kLength).check_found(), std::size_t{20});
}

TEST(one_record_of_many_reads_is_one_loss) {
    DeviceScene scene("losses_large");
    scene.open();
    constexpr std::size_t kLarge = 500000;  // eight pieces and more
    scene.put({1}, kLength);
    scene.put({2}, kLarge);
    const BadPlace place{offset_of(scene, 2), offset_of(scene, 2) + kLarge};
    scene.plan->set([place](const IoRequest& request) {
        return place.is_in(request) ? IoFault{IoFault::Kind::error, EIO, 0} : IoFault{};
    });
    CHECK(scene.get({2}, kLarge).are_all(DiskOutcome::failed));
    scene.step_until([&] { return scene.health().counts.unreadable_records == 1; });
    CHECK(scene.health().state == DeviceState::ready);
    CHECK_EQUAL(scene.get({1}, kLength).check_found(), std::size_t{1});
}

TEST(a_caller_without_time_says_nothing_of_the_device) {
    DeviceScene scene("losses_hurry");
    scene.terms.io_timeout = 1h;
    scene.terms.read_buffers = 32;
    scene.open();
    scene.put(range(0, 20), kLength);
    scene.plan->set([](const IoRequest& request) {
        return request.kind == IoKind::read ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    for (std::uint64_t number = 0; number < 12; ++number) {
        const Records hurried =
            make_records(DiskVerb::get, {number}, kLength, false, std::chrono::steady_clock::now() + 5ms);
        scene.run(hurried);
        CHECK(hurried.are_all(DiskOutcome::late));
    }
    CHECK(scene.health().state == DeviceState::ready);
    scene.plan->set({});
    scene.plan->release();
    CHECK_EQUAL(scene.get(range(0, 20), kLength).check_found(), std::size_t{20});
}

TEST(a_place_that_cannot_be_read_costs_a_recovery_one_record) {
    DeviceScene scene("losses_scan");
    scene.open();
    scene.put(range(0, 30), kLength);
    wear_out(scene, 7);
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.health().counts.scanned_segments, std::uint64_t{1});
    CHECK_EQUAL(scene.get(range(0, 30), kLength).check_found(), std::size_t{29});
    CHECK(!scene.device->contains(mark_of(key_of(7))));
}

TEST(a_segment_that_cannot_be_read_is_given_up_after_a_few_reads) {
    DeviceScene scene("losses_rest");
    scene.open();
    scene.put(range(0, 30), kLength);
    const BadPlace place{round_up(offset_of(scene, 7) + 1, kIoAlignment), kSmallSegment};
    std::uint64_t failed = 0;
    scene.plan->set([&failed, place](const IoRequest& request) {
        const bool is_bad = place.is_in(request) && is_of_segment(request, 0);
        failed += is_bad ? 1 : 0;
        return is_bad ? IoFault{IoFault::Kind::error, EIO, 0} : IoFault{};
    });
    scene.drop();
    scene.open();
    CHECK(scene.health().state == DeviceState::ready);
    CHECK(failed > 0 && failed <= 18);
    CHECK_EQUAL(scene.health().records, std::uint64_t{7});
    scene.plan->set({});
    CHECK_EQUAL(scene.get(range(0, 30), kLength).check_found(), std::size_t{7});
    // It was not for good, so nothing is lost.
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.get(range(0, 30), kLength).check_found(), std::size_t{30});
}

TEST(one_unreadable_head_is_one_segment_and_all_of_them_are_the_device) {
    DeviceScene scene("losses_heads");
    scene.open();
    scene.put(range(0, 150), kLength);
    const std::uint64_t segments = scene.health().segments;
    CHECK(segments >= 3);
    const auto are_bad = [&scene](auto is_bad) {
        scene.plan->set([is_bad](const IoRequest& request) {
            const bool is_head = request.kind == IoKind::read && request.offset == 0;
            return is_head && is_bad(request) ? IoFault{IoFault::Kind::error, EIO, 0} : IoFault{};
        });
    };
    CHECK(scene.close());
    are_bad([](const IoRequest&) { return true; });
    scene.open();
    CHECK(scene.health().state == DeviceState::absent);
    CHECK(scene.health().reason.find("reads fail: segment-") != std::string::npos);
    are_bad([](const IoRequest& request) { return is_of_segment(request, 1); });
    scene.step_until([&] { return scene.health().state == DeviceState::ready; });
    const std::uint64_t found = scene.get(range(0, 150), kLength).check_found();
    CHECK(found >= 90 && found < 150);
    CHECK_EQUAL(scene.health().counts.dropped_segments, std::uint64_t{1});
    CHECK(!std::filesystem::exists(scene.segment_path(1)));  // nor can it be back
    scene.plan->set({});
    CHECK(scene.put(range(200, 60), kLength).are_all(DiskOutcome::durable));
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.get(range(200, 60), kLength).check_found(), std::size_t{60});
    CHECK(scene.get(range(0, 150), kLength).check_found() <= found);
}

TEST(a_device_that_does_not_answer_is_asked_once) {
    DeviceScene scene("losses_hang");
    scene.open();
    scene.put(range(0, 150), kLength);
    CHECK(scene.close());
    scene.terms.io_timeout = 100ms;
    scene.terms.probe_interval = 1h;
    std::uint64_t asked = 0;
    scene.plan->set([&asked](const IoRequest&) {
        ++asked;
        return IoFault{IoFault::Kind::hang, 0, 0};
    });
    scene.open();
    CHECK(scene.health().state == DeviceState::absent);
    CHECK(scene.health().reason.find("timed out") != std::string::npos);
    CHECK_EQUAL(asked, std::uint64_t{1});
    scene.plan->set({});
    scene.plan->release();
    scene.device.reset();
    scene.open();
    CHECK_EQUAL(scene.get(range(0, 150), kLength).check_found(), std::size_t{150});
}

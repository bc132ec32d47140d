// A device whose records are coded: the same bytes, less room, and no harm by damage.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kLength = 40000;

struct CodedScene : DeviceScene {
    explicit CodedScene(const std::string& name) : DeviceScene(name) {
        terms.coding = DiskCoding::on;
        open();
    }
    std::vector<FooterEntry> entries() const { return device->list_segment(0); }
    void write_at(std::uint64_t offset, std::uint8_t byte) const {
        const FileDescriptor file(::open(segment_path(0).c_str(), O_WRONLY | O_CLOEXEC));
        CHECK_EQUAL(pwrite(file.number(), &byte, 1, static_cast<off_t>(offset)), ssize_t{1});
    }
    std::uint8_t read_at(std::uint64_t offset) const {
        const FileDescriptor file(::open(segment_path(0).c_str(), O_RDONLY | O_CLOEXEC));
        std::uint8_t byte = 0;
        CHECK_EQUAL(pread(file.number(), &byte, 1, static_cast<off_t>(offset)), ssize_t{1});
        return byte;
    }
};

// A clock that each look at it moves on, and each read that the test makes late. How fast this machine decodes does
// not matter then.
class Clock {
public:
    Instant now() { return Instant{} + Instant::duration{passed_ += Instant::duration{1us}.count()}; }
    void add(Instant::duration late) { passed_ += late.count(); }

private:
    std::atomic<Instant::rep> passed_{Instant::duration{1h}.count()};
};

}  // namespace

TEST(coded_records_come_back_as_they_were_and_take_less_room) {
    CodedScene scene("coding_round_trip");
    const auto numbers = range(kAlike, 12);
    CHECK(scene.put(numbers, kLength).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.get(numbers, kLength).check_found(), 12u);
    const DeviceHealth health = scene.health();
    CHECK_EQUAL(health.counts.put_bytes, 12 * kLength);
    CHECK_EQUAL(health.counts.coded_records, 12u);
    CHECK_EQUAL(health.counts.coded_bytes, 12 * kLength);
    CHECK(health.counts.coded_stored_bytes * 10 < health.counts.coded_bytes * 8);
    CHECK(health.live_bytes < health.counts.coded_stored_bytes + 12 * (kRecordHeaderBytes + kRecordAlignment));
    CHECK(health.counts.written_bytes < health.counts.put_bytes);
}

TEST(a_record_that_is_there_is_not_written_again_however_it_was_coded) {
    CodedScene scene("coding_again");
    const auto numbers = range(kAlike, 4);
    scene.put(numbers, kLength);
    for (const DiskCoding coding : {DiskCoding::on, DiskCoding::off}) {
        scene.terms.coding = coding;
        scene.reopen();
        CHECK(scene.put(numbers, kLength).are_all(DiskOutcome::durable));
        CHECK_EQUAL(scene.health().counts.put_records, std::uint64_t{0});
        CHECK_EQUAL(scene.get(numbers, kLength).check_found(), 4u);
    }
}

TEST(records_that_do_not_become_shorter_lie_beside_those_that_do) {
    CodedScene scene("coding_mixed");
    const std::vector<std::uint64_t> numbers = {1, kAlike + 1, 2, kAlike + 2, kAlike + 3, 3};
    CHECK(scene.put(numbers, kLength).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.health().counts.coded_records, 3u);
    scene.reopen();
    CHECK_EQUAL(scene.get(numbers, kLength).check_found(), 6u);
}

TEST(coded_records_are_found_after_a_restart_with_and_without_a_footer) {
    CodedScene scene("coding_restart");
    const auto numbers = range(kAlike, 10);
    CHECK(scene.put(numbers, kLength).are_all(DiskOutcome::durable));
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.health().counts.scanned_segments, 1u);
    CHECK_EQUAL(scene.get(numbers, kLength).check_found(), 10u);
    scene.reopen();
    CHECK_EQUAL(scene.health().counts.scanned_segments, 0u);
    CHECK_EQUAL(scene.get(numbers, kLength).check_found(), 10u);
}

TEST(coded_records_are_read_with_coding_off_and_others_with_coding_on) {
    CodedScene scene("coding_switched");
    CHECK(scene.put(range(kAlike, 5), kLength).are_all(DiskOutcome::durable));
    CHECK(scene.close());
    scene.terms.coding = DiskCoding::off;
    scene.open();
    CHECK_EQUAL(scene.get(range(kAlike, 5), kLength).check_found(), 5u);
    CHECK(scene.put(range(kAlike + 5, 5), kLength).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.health().counts.coded_records, 0u);
    CHECK(scene.close());
    scene.terms.coding = DiskCoding::on;
    scene.open();
    CHECK_EQUAL(scene.get(range(kAlike, 10), kLength).check_found(), 10u);
}

TEST(records_longer_than_a_buffer_are_coded) {
    CodedScene scene("coding_long");
    const std::size_t length = 400 << 10;
    CHECK(scene.put({kAlike, kAlike + 1}, length).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.get({kAlike, kAlike + 1}, length).check_found(), 2u);
    CHECK_EQUAL(scene.health().counts.coded_records, 2u);
}

TEST(more_records_than_a_step_codes_are_all_written) {
    CodedScene scene("coding_steps");
    scene.terms.capacity_bytes = 32 * kSmallSegment;
    scene.reopen();
    const auto numbers = range(kAlike, 24);
    CHECK(scene.put(numbers, 300 << 10).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.get(numbers, 300 << 10).check_found(), 24u);
}

TEST(a_record_that_was_damaged_in_memory_is_not_coded_to_disk) {
    CodedScene scene("coding_damaged_memory");
    const Records records = make_records(DiskVerb::put, {kAlike, kAlike + 1}, kLength);
    const_cast<std::byte&>(records.memory[0][77]) ^= std::byte{1};
    scene.run(records);
    CHECK(records.outcome(0) == DiskOutcome::damaged);
    CHECK(records.outcome(1) == DiskOutcome::written);
    CHECK_EQUAL(scene.get({kAlike, kAlike + 1}, kLength).check_found(), 1u);
}

// The code or the digest sees each of them; the record's neighbour is not harmed.
TEST(a_coded_record_that_is_damaged_on_disk_is_a_miss_wherever_it_is) {
    constexpr std::size_t kShort = 3000;
    CodedScene scene("coding_damaged_disk");
    const auto numbers = range(kAlike, 120);
    CHECK(scene.put(numbers, kShort).are_all(DiskOutcome::durable));
    const std::vector<FooterEntry> entries = scene.entries();
    CHECK_EQUAL(entries.size(), numbers.size());
    for (std::size_t i = 0; i < entries.size(); i += 2) {
        const std::uint64_t length = entries[i].coded_length;
        CHECK(length != 0);
        const std::uint64_t at = entries[i].offset + kRecordHeaderBytes + length * i / entries.size();
        scene.write_at(at, scene.read_at(at) ^ static_cast<std::uint8_t>(1 << i / 2 % 8));
    }
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        const Records got = scene.get({numbers[i]}, kShort);
        got.check_found();
        CHECK(got.outcome() == (i % 2 == 0 ? DiskOutcome::damaged : DiskOutcome::found));
    }
    CHECK_EQUAL(scene.health().counts.damaged_records, numbers.size() / 2);
}

TEST(coded_records_that_were_read_move_when_their_segment_goes) {
    CodedScene scene("coding_moves");
    const auto kept = range(kAlike, 2);
    CHECK(scene.put(kept, kLength).are_all(DiskOutcome::durable));
    std::size_t found = 0;
    for (std::uint64_t round = 0; round < 40; ++round) {
        CHECK(scene.put(range(kAlike + 100 + 8 * round, 8), kLength).are_all(DiskOutcome::durable));
        found = scene.get(kept, kLength).check_found();
    }
    CHECK_EQUAL(found, 2u);
    const DeviceHealth health = scene.health();
    CHECK(health.counts.moved_bytes > 0);
    CHECK(health.counts.evicted_segments > 0);
}

TEST(automatic_follows_what_reading_plain_and_coded_records_takes) {
    Clock clock;
    std::chrono::milliseconds read_takes{5};  // 64 KiB of it: much longer than decoding
    CodedScene scene("coding_automatic");
    scene.terms.coding = DiskCoding::automatic;
    scene.terms.now = [&clock] { return clock.now(); };
    scene.reopen();
    scene.plan->set([&](const IoRequest& request) {
        clock.add(request.kind == IoKind::read ? read_takes : 0ms);
        return IoFault{};
    });
    const auto coded_of = [&scene](std::uint64_t first) {
        const std::uint64_t before = scene.health().counts.coded_records;
        CHECK(scene.put(range(first, 40), kLength).are_all(DiskOutcome::durable));
        return scene.health().counts.coded_records - before;
    };
    const auto read_much = [&scene](std::uint64_t first) {
        for (std::uint64_t bytes = 0; bytes < CodingChoice::kKnownBytes; bytes += 40 * kLength) {
            CHECK_EQUAL(scene.get(range(first, 40), kLength).check_found(), 40u);
        }
    };
    CHECK_EQUAL(coded_of(kAlike), 0u);  // nothing was read yet
    read_much(kAlike);
    CHECK_EQUAL(coded_of(kAlike + 40), 40u);
    read_takes = 20ms;
    read_much(kAlike + 40);
    CHECK_EQUAL(coded_of(kAlike + 80), 0u);
}

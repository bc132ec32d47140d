// A device whose records are sealed: none of their bytes on it, and a miss without the key, or where anything was
// changed.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kLength = 40000;

std::shared_ptr<const SealKeys> keys_of(const std::vector<std::uint8_t>& first_bytes) {
    std::vector<SealKey> keys(first_bytes.size());
    for (std::size_t i = 0; i < keys.size(); ++i) {
        keys[i].fill(first_bytes[i]);
    }
    Result<SealKeys> made = SealKeys::make(keys);
    CHECK(made.ok());
    return std::make_shared<const SealKeys>(std::move(made.value()));
}

struct SealedScene : DeviceScene {
    explicit SealedScene(const std::string& name, DiskCoding coding = DiskCoding::off) : DeviceScene(name) {
        terms.coding = coding;
        terms.seal_keys = keys_of({1});
        open();
    }
    void reopen_with(std::shared_ptr<const SealKeys> keys) {
        CHECK(close());
        terms.seal_keys = std::move(keys);
        open();
    }
    std::string bytes_on_disk() const {
        std::string all;
        for (const auto& entry : std::filesystem::directory_iterator(folder.root())) {
            std::ifstream file(entry.path(), std::ios::binary);
            all.append(std::istreambuf_iterator<char>(file), {});
        }
        return all;
    }
    void flip(std::uint64_t offset, unsigned bit) const {
        const FileDescriptor file(::open(segment_path(0).c_str(), O_RDWR | O_CLOEXEC));
        std::uint8_t byte = 0;
        CHECK_EQUAL(pread(file.number(), &byte, 1, static_cast<off_t>(offset)), ssize_t{1});
        byte ^= static_cast<std::uint8_t>(1U << bit);
        CHECK_EQUAL(pwrite(file.number(), &byte, 1, static_cast<off_t>(offset)), ssize_t{1});
    }
    // Puts a header of its own, with a right checksum, where the first record has one.
    void replace_header(const RecordHeader& header) const {
        const FileDescriptor file(::open(segment_path(0).c_str(), O_RDWR | O_CLOEXEC));
        CHECK_EQUAL(pwrite(file.number(), &header, sizeof header, kHeadBytes), static_cast<ssize_t>(sizeof header));
    }
};

bool has_bytes_of(const std::string& all, std::uint64_t number, std::size_t length) {
    const std::vector<std::byte> bytes = bytes_of(number, length);
    const std::string_view text(reinterpret_cast<const char*>(bytes.data()), length);
    for (std::size_t at = 0; at + 16 <= length; at += 4000) {
        if (all.find(text.substr(at, 16)) != std::string::npos) {
            return true;
        }
    }
    return false;
}

}  // namespace

TEST(sealed_records_come_back_and_none_of_their_bytes_is_on_the_disk) {
    for (const DiskCoding coding : {DiskCoding::off, DiskCoding::on}) {
        SealedScene scene("sealing_round_trip", coding);
        const auto numbers = range(kAlike - 6, 12);  // six that become shorter, and six that do not
        CHECK(scene.put(numbers, kLength).are_all(DiskOutcome::durable));
        const Records got = scene.get(numbers, kLength);
        CHECK_EQUAL(got.check_found(), 12u);
        for (std::size_t i = 0; i < numbers.size(); ++i) {
            CHECK_EQUAL(got.batch->item(i).digest, digest_of(numbers[i], kLength));
            CHECK_EQUAL(got.batch->item(i).parent[0], static_cast<std::uint8_t>(numbers[i]));
        }
        CHECK_EQUAL(scene.health().counts.coded_records, coding == DiskCoding::on ? 6u : 0u);
        const std::string all = scene.bytes_on_disk();
        for (const std::uint64_t number : numbers) {
            CHECK(!has_bytes_of(all, number, kLength));
            const std::uint64_t digest = digest_of(number, kLength);
            CHECK(all.find(std::string(reinterpret_cast<const char*>(&digest), sizeof digest)) == std::string::npos);
        }
    }
}

TEST(without_keys_the_bytes_are_on_the_disk_and_the_format_is_the_former_one) {
    SealedScene scene("sealing_off");
    scene.reopen_with(nullptr);
    CHECK(scene.put({1}, kLength).are_all(DiskOutcome::durable));
    CHECK(has_bytes_of(scene.bytes_on_disk(), 1, kLength));
    CHECK_EQUAL(scene.device->list_segment(0).at(0).sealed, std::uint16_t{0});
}

TEST(records_longer_than_reads_and_buffers_are_sealed) {
    for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{400} << 10, std::size_t{512} << 10}) {
        SealedScene scene("sealing_lengths");
        CHECK(scene.put({1, 2}, length).are_all(DiskOutcome::durable));
        CHECK_EQUAL(scene.get({1, 2}, length).check_found(), 2u);
        scene.drop();
        scene.open();
        CHECK(scene.health().counts.scanned_segments > 0);
        CHECK_EQUAL(scene.get({1, 2}, length).check_found(), 2u);
    }
}

TEST(sealed_records_are_found_after_a_restart_with_and_without_a_footer) {
    for (const DiskCoding coding : {DiskCoding::off, DiskCoding::on}) {
        SealedScene scene("sealing_restart", coding);
        const auto numbers = range(kAlike - 5, 10);
        CHECK(scene.put(numbers, kLength).are_all(DiskOutcome::durable));
        scene.drop();
        scene.open();
        CHECK_EQUAL(scene.health().counts.scanned_segments, 1u);
        CHECK_EQUAL(scene.get(numbers, kLength).check_found(), 10u);
        scene.reopen();
        CHECK_EQUAL(scene.health().counts.scanned_segments, 0u);
        CHECK_EQUAL(scene.get(numbers, kLength).check_found(), 10u);
    }
}

TEST(a_new_key_seals_new_records_and_the_old_one_still_opens) {
    SealedScene scene("sealing_rotation");
    CHECK(scene.put(range(1, 4), kLength).are_all(DiskOutcome::durable));
    scene.reopen_with(keys_of({2, 1}));
    CHECK(scene.put(range(5, 4), kLength).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.get(range(1, 8), kLength).check_found(), 8u);
    scene.reopen_with(keys_of({2}));
    CHECK_EQUAL(scene.get(range(5, 4), kLength).check_found(), 4u);
    CHECK_EQUAL(scene.get(range(1, 4), kLength).check_found(), 0u);
}

TEST(records_whose_key_is_missing_are_misses_and_make_room_for_new_ones) {
    for (const bool has_footer : {true, false}) {
        for (const bool has_other_key : {true, false}) {
            SealedScene scene("sealing_lost");
            CHECK(scene.put(range(1, 4), kLength).are_all(DiskOutcome::durable));
            if (has_footer) {
                CHECK(scene.close());
            } else {
                scene.drop();
            }
            scene.terms.seal_keys = has_other_key ? keys_of({9}) : nullptr;
            scene.open();
            CHECK_EQUAL(scene.get(range(1, 4), kLength).check_found(), 0u);
            CHECK(scene.get(range(1, 4), kLength).are_all(DiskOutcome::missing));
            CHECK(scene.put(range(1, 4), kLength).are_all(DiskOutcome::durable));
            CHECK_EQUAL(scene.get(range(1, 4), kLength).check_found(), 4u);
        }
    }
}

TEST(records_that_are_not_sealed_are_not_read_with_keys) {
    for (const DiskCoding coding : {DiskCoding::off, DiskCoding::on}) {
        SealedScene scene("sealing_planted", coding);
        scene.reopen_with(nullptr);
        CHECK(scene.put(range(kAlike, 4), kLength).are_all(DiskOutcome::durable));
        scene.reopen_with(keys_of({1}));
        CHECK(scene.get(range(kAlike, 4), kLength).are_all(DiskOutcome::damaged));
        CHECK(scene.put(range(kAlike, 4), kLength).are_all(DiskOutcome::durable));
        CHECK_EQUAL(scene.get(range(kAlike, 4), kLength).check_found(), 4u);
    }
}

// Header, head, payload and tag; the record's neighbour is not harmed.
TEST(a_sealed_record_that_was_changed_anywhere_is_a_miss) {
    constexpr std::size_t kShort = 3000;
    SealedScene scene("sealing_changed");
    scene.terms.capacity_bytes = 32 * kSmallSegment;
    scene.reopen();
    const auto numbers = range(1, 200);
    CHECK(scene.put(numbers, kShort).are_all(DiskOutcome::durable));
    const std::vector<FooterEntry> entries = scene.device->list_segment(0);
    CHECK_EQUAL(entries.size(), numbers.size());
    const std::uint64_t length = kRecordHeaderBytes + kShort + kSealOverheadBytes;
    for (std::size_t i = 0; i < entries.size(); i += 2) {
        scene.flip(entries[i].offset + (length - 1) * i / (entries.size() - 2), i / 2 % 8);
    }
    for (std::size_t i = 0; i < numbers.size(); ++i) {
        const Records got = scene.get({numbers[i]}, kShort);
        got.check_found();
        CHECK(got.outcome() == (i % 2 == 0 ? DiskOutcome::damaged : DiskOutcome::found));
    }
}

TEST(a_record_cannot_be_put_in_another_ones_place) {
    SealedScene scene("sealing_moved");
    CHECK(scene.put({1}, kLength).are_all(DiskOutcome::durable));
    const FooterEntry entry = scene.device->list_segment(0).at(0);
    CHECK_EQUAL(entry.sealed, std::uint16_t{1});
    CHECK_EQUAL(entry.digest, scene.terms.seal_keys->sealing());
    scene.drop();
    RecordHeader header;
    std::ifstream(scene.segment_path(0), std::ios::binary)
        .seekg(static_cast<std::streamoff>(kHeadBytes))
        .read(reinterpret_cast<char*>(&header), sizeof header);
    // Another block's name, and then another parent.
    const RecordHeader other = make_record_header(header.life, key_of(2), header.parent, header.length, 0,
                                                  RecordFlag::none, header.coded_length, header.digest);
    scene.replace_header(other);
    scene.open();
    CHECK_EQUAL(scene.get({1, 2}, kLength).check_found(), 0u);
    scene.drop();
    const RecordHeader child = make_record_header(header.life, header.key, {}, header.length, 0, RecordFlag::none,
                                                  header.coded_length, header.digest);
    scene.replace_header(child);
    scene.open();
    CHECK_EQUAL(scene.get({1}, kLength).check_found(), 0u);
    scene.drop();
    scene.replace_header(header);
    scene.open();
    CHECK_EQUAL(scene.get({1}, kLength).check_found(), 1u);
}

TEST(sealed_records_that_were_read_move_when_their_segment_goes) {
    SealedScene scene("sealing_moves");
    const auto kept = range(1, 2);
    CHECK(scene.put(kept, kLength).are_all(DiskOutcome::durable));
    std::size_t found = 0;
    for (std::uint64_t round = 0; round < 40; ++round) {
        CHECK(scene.put(range(100 + 8 * round, 8), kLength).are_all(DiskOutcome::durable));
        found = scene.get(kept, kLength).check_found();
    }
    CHECK_EQUAL(found, 2u);
    CHECK(scene.health().counts.moved_bytes > 0);
}

TEST(a_record_that_was_damaged_in_memory_is_not_sealed) {
    SealedScene scene("sealing_damaged_memory");
    const Records records = make_records(DiskVerb::put, {1, 2}, kLength);
    const_cast<std::byte&>(records.memory[0][77]) ^= std::byte{1};
    scene.run(records);
    CHECK(records.outcome(0) == DiskOutcome::damaged);
    CHECK(records.outcome(1) == DiskOutcome::written);
}

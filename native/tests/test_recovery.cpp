#include "disk/recovery.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::uint64_t kTiny = 64 << 10;
constexpr std::uint64_t kLimit = 16 << 10;
constexpr std::size_t kLengths[] = {10, 300, 5000, 0, 64, 4000};

// One segment as a device writes it, and the numbers of its records.
struct Image {
    std::vector<std::byte> bytes;
    std::uint64_t store = 0;

    explicit Image(bool is_sealed) {
        DeviceScene scene("recovery_image");
        scene.terms.segment_bytes = kTiny;
        scene.terms.capacity_bytes = 4 * kTiny;
        scene.terms.record_limit_bytes = kLimit;
        scene.open();
        std::vector<Records> kept;
        for (std::uint64_t i = 0; i < std::size(kLengths); ++i) {
            // Some lie behind each other, some begin a block of their own.
            kept.push_back(make_records(DiskVerb::put, {i}, kLengths[i], true));
            i % 2 == 0 ? scene.start(kept.back()) : scene.run(kept.back());
        }
        is_sealed ? static_cast<void>(scene.close()) : scene.drop();
        std::ifstream file(scene.segment_path(0), std::ios::binary);
        bytes.resize(kTiny);
        file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(kTiny));
        CHECK_EQUAL(static_cast<std::uint64_t>(file.gcount()), kTiny);
        SegmentHead head;
        std::memcpy(&head, bytes.data(), sizeof head);
        store = head.life.store;
    }
    std::optional<FoundSegment> find() const {
        const ReadExactly read = [this](std::uint64_t offset, std::span<std::byte> target) {
            if (offset + target.size() > bytes.size()) {
                return false;
            }
            std::memcpy(target.data(), bytes.data() + offset, target.size());
            return true;
        };
        return find_segment(read, store, kTiny, kLimit);
    }
    // How many records are found and whole, as a read checks them. A wrong one fails the test.
    std::size_t count_served() const {
        const std::optional<FoundSegment> found = find();
        std::size_t served = 0;
        for (const FooterEntry& entry : found ? found->entries : std::vector<FooterEntry>()) {
            RecordHeader header;
            std::memcpy(&header, bytes.data() + entry.offset, sizeof header);
            const std::byte* const record = bytes.data() + entry.offset + sizeof header;
            const bool is_record = is_record_header(header, found->life, kTiny - entry.offset) &&
                                   header.length == entry.length && header.key == entry.key &&
                                   digest_record({reinterpret_cast<const std::uint8_t*>(record), entry.length},
                                                 name_of(entry.key)) == header.digest;
            if (!is_record) {
                continue;
            }
            bool is_known = false;
            for (std::uint64_t i = 0; i < std::size(kLengths); ++i) {
                is_known = is_known || (key_of(i) == header.key && kLengths[i] == header.length &&
                                        std::ranges::equal(bytes_of(i, kLengths[i]), std::span(record, header.length)));
            }
            CHECK(is_known);
            ++served;
        }
        return served;
    }
};

}  // namespace

TEST(a_sealed_segment_is_found_by_its_footer) {
    const Image image(true);
    const std::optional<FoundSegment> found = image.find();
    CHECK(found && found->has_footer);
    CHECK_EQUAL(found->entries.size(), std::size(kLengths));
    CHECK_EQUAL(image.count_served(), std::size(kLengths));
}

TEST(a_segment_without_a_footer_is_found_by_its_records) {
    const Image image(false);
    const std::optional<FoundSegment> found = image.find();
    CHECK(found && !found->has_footer);
    CHECK_EQUAL(found->entries.size(), std::size(kLengths));
}

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kFlipStep = 61;  // bytes; a sanitized scan takes many times the instructions
#else
constexpr std::uint64_t kFlipStep = 1;
#endif

TEST(every_single_bit_flip_is_detected_or_harmless) {
    for (const bool is_sealed : {true, false}) {
        Image image(is_sealed);
        const std::vector<FooterEntry> entries = image.find()->entries;
        const std::uint64_t footer = kTiny - footer_bytes(entries.size());
        std::map<char, std::uint64_t> kinds;
        for (std::uint64_t at = 0; at < kTiny; at += kFlipStep) {
            const auto owner = std::ranges::find_if(entries, [at](const FooterEntry& entry) {
                return at >= entry.offset && at < entry.offset + kRecordHeaderBytes + entry.length;
            });
            const bool is_used = at < kHeadBytes || at >= footer || owner != entries.end();
            for (int bit = is_used ? 0 : 7; bit < 8; ++bit) {
                image.bytes[at] ^= static_cast<std::byte>(1 << bit);
                const std::size_t served = image.count_served();
                CHECK(at < footer || !image.find()->has_footer);
                image.bytes[at] ^= static_cast<std::byte>(1 << bit);
                if (at < kHeadBytes) {
                    CHECK_EQUAL(served, std::size_t{0});
                    ++kinds['h'];
                } else if (owner != entries.end()) {
                    CHECK_EQUAL(served, entries.size() - 1);  // that one, and no other
                    ++kinds['r'];
                } else {
                    CHECK_EQUAL(served, entries.size());  // a footer that does not verify is not needed
                    kinds[at >= footer ? 'f' : 'g'] += 1;
                }
            }
        }
        const bool are_all = kinds['h'] == 8 * kHeadBytes && kinds['f'] == 8 * (kTiny - footer);
        CHECK(kFlipStep > 1 || (are_all && kinds['r'] > 8 * 9000));
        CHECK(kinds['h'] > 0 && kinds['f'] > 0 && kinds['r'] > 0);
    }
}

TEST(every_flipped_bit_of_a_record_on_disk_is_a_miss_to_who_reads_it) {
    constexpr std::size_t kLength = 40;
    constexpr std::uint64_t kBits = 8 * (kRecordHeaderBytes + kLength);
    DeviceScene scene("recovery_bits");
    scene.terms.sync_interval = 1h;
    scene.open();
    // As many records as one has bits, and of each another bit is flipped under the device's eyes.
    CHECK(scene.put(range(0, kBits), kLength).are_all(DiskOutcome::durable));
    const std::vector<FooterEntry> entries = scene.device->list_segment(0);
    CHECK_EQUAL(entries.size(), kBits);
    const FileDescriptor file(open(scene.segment_path(0).c_str(), O_RDWR | O_CLOEXEC));
    for (std::uint64_t i = 0; i < kBits; ++i) {
        std::uint8_t byte = 0;
        const auto at = static_cast<off_t>(entries[i].offset + i / 8);
        CHECK_EQUAL(pread(file.number(), &byte, 1, at), ssize_t{1});
        byte = static_cast<std::uint8_t>(byte ^ 1 << i % 8);
        CHECK_EQUAL(pwrite(file.number(), &byte, 1, at), ssize_t{1});
    }
    const Records got = scene.get(range(0, kBits), kLength);
    CHECK(got.are_all(DiskOutcome::damaged));
    CHECK_EQUAL(scene.health().counts.damaged_records, kBits);
    CHECK_EQUAL(scene.health().records, std::uint64_t{0});
    scene.drop();
    scene.open();
    CHECK_EQUAL(scene.get(range(0, kBits), kLength).check_found(), std::size_t{0});
}

namespace {

// A device has written a segment and left it without a footer.
struct Scene {
    explicit Scene(const std::string& name) : scene("segment_io_" + name) {
        scene.open();
        scene.put(range(0, 10), 20000);
        scene.drop();
        files.emplace(scene.terms, counts);
        CHECK(files->open().ok());
        CHECK(files->open_file(0).ok());
        runner.emplace(std::move(scene.terms.make_engine().value()), scene.terms.write_depth);
        io.emplace(scene.terms, *runner, *files, counts);
    }
    ~Scene() { CHECK(runner->close(10000)); }

    DeviceScene scene;
    DeviceCounts counts;
    std::optional<SegmentFiles> files;
    std::optional<IoRunner> runner;
    std::optional<SegmentIo> io;
};

}  // namespace

TEST(a_segment_without_a_footer_is_gone_through_and_given_one) {
    Scene scene("footer");
    int error = 0;
    std::optional<FoundSegment> found = scene.io->find(0, error);
    CHECK(found && !found->has_footer && found->is_whole);
    CHECK_EQUAL(found->entries.size(), std::size_t{10});
    CHECK_EQUAL(error, 0);
    CHECK(scene.counts.read_bytes > 0);
    scene.files->go_on_with_life(0, found->life);
    CHECK(!scene.io->find_entries(0));
    CHECK(scene.io->write_footer(0, *found));
    CHECK_EQUAL(scene.counts.written_bytes, footer_bytes(10));
    CHECK_EQUAL(scene.io->find_entries(0).value().size(), std::size_t{10});
    CHECK(scene.io->find(0, error)->has_footer);
}

TEST(a_footer_is_written_only_where_its_room_was_kept) {
    Scene scene("no_room");
    int error = 0;
    std::optional<FoundSegment> found = scene.io->find(0, error);
    found->entries.back().offset = kSmallSegment - 8192;
    CHECK(!scene.io->write_footer(0, *found));
    CHECK_EQUAL(scene.counts.written_bytes, std::uint64_t{0});
}

TEST(the_first_error_is_told_and_each_is_counted) {
    Scene scene("error");
    fail_kind(*scene.scene.plan, IoKind::read, EIO);
    int error = 0;
    CHECK(!scene.io->find(0, error));
    CHECK_EQUAL(error, EIO);
    CHECK_EQUAL(scene.counts.io_errors, std::uint64_t{1});
    CHECK(!scene.io->find_entries(0));
    CHECK_EQUAL(scene.counts.io_errors, std::uint64_t{2});
}

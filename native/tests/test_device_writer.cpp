#include "disk/device_writer.hpp"

#include <vector>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

struct Scene {
    explicit Scene(DiskCoding coding) : choice(coding), coder(terms, choice, counts) {}

    std::span<const std::uint8_t> code(std::uint64_t number, std::size_t length = 20000) {
        const Records records = make_records(DiskVerb::put, {number}, length);
        return coder.code(records.batch->item(0))->bytes;
    }

    DeviceTerms terms;
    DeviceCounts counts;
    CodingChoice choice;
    RecordCoder coder;
};

}  // namespace

TEST(what_becomes_shorter_is_coded_and_counted) {
    Scene scene(DiskCoding::on);
    const std::span<const std::uint8_t> coded = scene.code(kAlike);
    CHECK(!coded.empty() && coded.size() < 20000);
    std::vector<std::uint8_t> decoded(20000);
    CHECK(decode_record(coded, decoded));
    const std::vector<std::byte> wanted = bytes_of(kAlike, 20000);
    CHECK_EQUAL(std::memcmp(decoded.data(), wanted.data(), 20000), 0);
    CHECK_EQUAL(scene.counts.coded_records, std::uint64_t{1});
    CHECK_EQUAL(scene.counts.coded_bytes, std::uint64_t{20000});
    CHECK_EQUAL(scene.counts.coded_stored_bytes, std::uint64_t{coded.size()});
}

TEST(what_does_not_become_shorter_is_written_as_it_is) {
    Scene scene(DiskCoding::on);
    CHECK(scene.code(1).empty());
    CHECK_EQUAL(scene.counts.coded_records, std::uint64_t{0});
}

TEST(nothing_is_tried_where_coding_is_off) {
    Scene scene(DiskCoding::off);
    CHECK(scene.code(kAlike, kCodedBytesAStep).empty());
    CHECK(!scene.coder.has_coded_enough());
}

TEST(the_automatic_choice_knows_after_one_record_how_fast_decoding_is) {
    Scene scene(DiskCoding::automatic);
    scene.choice.told_read(64 << 20, 0, 64s);  // a device that is very slow
    CHECK(scene.choice.needs_trial());
    CHECK(!scene.code(kAlike).empty());
    CHECK(!scene.choice.needs_trial());
}

TEST(a_step_has_its_share_of_bytes_that_are_tried) {
    Scene scene(DiskCoding::on);
    scene.code(1, kCodedBytesAStep / 2);
    CHECK(!scene.coder.has_coded_enough());
    scene.code(2, kCodedBytesAStep / 2);
    CHECK(scene.coder.has_coded_enough());
    scene.coder.begin_step();
    CHECK(!scene.coder.has_coded_enough());
}

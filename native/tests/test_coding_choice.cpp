#include "disk/coding_choice.hpp"

#include <vector>

#include "check.hpp"

using namespace kvo;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kMuch = std::uint64_t{64} << 20;
constexpr std::uint64_t kLength = 1 << 20;

// How long so much takes at this speed.
CodingChoice::Time at(double gigabytes_a_second) {
    return CodingChoice::Time(static_cast<std::int64_t>(static_cast<double>(kMuch) / gigabytes_a_second));
}

void read_plain(CodingChoice& choice, double gigabytes_a_second) { choice.told_read(kMuch, 0, at(gigabytes_a_second)); }

void read_coded(CodingChoice& choice, double gigabytes_a_second) { choice.told_read(0, kMuch, at(gigabytes_a_second)); }

}  // namespace

TEST(off_codes_nothing_and_on_everything) {
    CHECK(!CodingChoice(DiskCoding::off).wants(0, kLength));
    CHECK(CodingChoice(DiskCoding::on).wants(0, kLength));
}

TEST(a_group_that_does_not_become_shorter_is_tried_rarely) {
    CodingChoice choice(DiskCoding::on);
    const auto tried_of = [&choice](std::uint32_t group, std::uint64_t after) {
        int tried = 0;
        for (int i = 0; i < 1024; ++i) {
            if (choice.wants(group, kLength)) {
                ++tried;
                choice.told_coded(group, 100, after);
            }
        }
        return tried;
    };
    CHECK_EQUAL(tried_of(0, 100), 16 + 3);
    CHECK_EQUAL(tried_of(1, 66), 1024);
    // One that becomes shorter makes the group worth trying again.
    while (!choice.wants(0, kLength)) {
    }
    choice.told_coded(0, 100, 66);
    CHECK(choice.wants(0, kLength));
}

TEST(automatic_codes_nothing_before_the_device_is_known) {
    CodingChoice choice(DiskCoding::automatic);
    CHECK(!choice.wants(0, kLength));
    choice.told_read(CodingChoice::kKnownBytes - 1, 0, 1s);
    CHECK(!choice.wants(0, kLength));
    choice.told_read(1, 0, 1s);
    CHECK(choice.wants(0, kLength));
    CHECK(choice.needs_trial());
}

TEST(before_coded_records_were_read_decoding_must_keep_up) {
    struct Case {
        double reading, decoding;
        bool is_coded;
    };
    for (const Case& one : {Case{0.2, 2, true}, Case{1.1, 2, true}, Case{1.3, 2, false}, Case{3, 2, false},
                            Case{0.5, 0.5, false}, Case{0.1, 0.5, true}}) {
        CodingChoice choice(DiskCoding::automatic);
        read_plain(choice, one.reading);
        choice.told_decoded(kMuch, at(one.decoding));
        CHECK(!choice.needs_trial());
        CHECK_EQUAL(choice.wants(0, kLength), one.is_coded);
    }
}

TEST(automatic_codes_what_was_read_sooner) {
    struct Case {
        double plain, coded;
        bool is_coded;
    };
    for (const Case& one : {Case{0.5, 0.7, true}, Case{0.5, 0.51, false}, Case{2, 1, false}, Case{3, 3.3, true}}) {
        CodingChoice choice(DiskCoding::automatic);
        read_plain(choice, one.plain);
        read_coded(choice, one.coded);
        choice.told_decoded(kMuch, at(2));
        CHECK_EQUAL(choice.wants(0, kLength), one.is_coded);
    }
}

TEST(periods_with_records_of_both_kinds_say_nothing) {
    CodingChoice choice(DiskCoding::automatic);
    choice.told_read(kMuch, kMuch, 1s);
    choice.told_read(0, 0, 1s);
    CHECK(!choice.wants(0, kLength));
    choice.told_read(kMuch, kMuch / 8, 1s);
    CHECK(choice.wants(0, kLength));
}

TEST(before_coded_records_were_read_the_ratio_of_a_group_counts) {
    CodingChoice choice(DiskCoding::automatic);
    read_plain(choice, 1.3);
    choice.told_decoded(kMuch, at(2));
    CHECK(!choice.wants(0, kLength));
    for (int i = 0; i < 100; ++i) {
        choice.told_coded(0, 120, 100);
    }
    CHECK(choice.wants(0, kLength));
    CHECK(!choice.wants(1, kLength));
}

TEST(automatic_follows_the_speed_of_the_device) {
    CodingChoice choice(DiskCoding::automatic);
    read_plain(choice, 0.3);
    read_coded(choice, 0.45);
    CHECK(choice.wants(0, kLength));
    for (int i = 0; i < 100; ++i) {
        read_plain(choice, 5);
        read_coded(choice, 3);
    }
    CHECK(!choice.wants(0, kLength));
}

TEST(now_and_then_some_records_go_the_other_way) {
    for (const bool codes : {true, false}) {
        CodingChoice choice(DiskCoding::automatic);
        read_plain(choice, 1);
        read_coded(choice, codes ? 1.4 : 0.9);
        std::uint64_t tried = 0;
        std::vector<std::uint64_t> begun;
        bool was_tried = false;
        for (std::uint64_t asked = 0; asked < 3 * CodingChoice::kTrialEveryBytes; asked += kLength) {
            const bool is_tried = choice.wants(0, kLength) != codes;
            tried += is_tried ? kLength : 0;
            if (is_tried && !was_tried) {
                begun.push_back(asked / CodingChoice::kFirstTrialBytes);
            }
            was_tried = is_tried;
        }
        CHECK(begun == std::vector<std::uint64_t>({1, 2, 4, 8, 16}));
        CHECK_EQUAL(tried, begun.size() * CodingChoice::kKnownBytes);
    }
}

TEST(what_waits_for_the_code_is_written_as_it_is) {
    CodingChoice choice(DiskCoding::automatic);
    read_plain(choice, 0.5);
    read_coded(choice, 0.7);
    choice.told_waiting(CodingChoice::kBehindBytes);
    CHECK(!choice.wants(0, kLength));
    choice.told_waiting(CodingChoice::kBehindBytes - 1);
    CHECK(choice.wants(0, kLength));
    // The setting `on` codes always.
    CodingChoice always(DiskCoding::on);
    always.told_waiting(CodingChoice::kBehindBytes);
    CHECK(always.wants(0, kLength));
}

#include "disk/coding_choice.hpp"

#include "check.hpp"

using namespace kvo;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t kMuch = std::uint64_t{64} << 20;

// How long so much takes at this speed.
CodingChoice::Time at(double gigabytes_a_second) {
    return CodingChoice::Time(static_cast<std::int64_t>(static_cast<double>(kMuch) / gigabytes_a_second));
}

}  // namespace

TEST(off_codes_nothing_and_on_everything) {
    CHECK(!CodingChoice(DiskCoding::off).wants(0));
    CHECK(CodingChoice(DiskCoding::on).wants(0));
}

TEST(a_group_that_does_not_become_shorter_is_tried_rarely) {
    CodingChoice choice(DiskCoding::on);
    const auto tried_of = [&choice](std::uint32_t group, std::uint64_t after) {
        int tried = 0;
        for (int i = 0; i < 1024; ++i) {
            if (choice.wants(group)) {
                ++tried;
                choice.told_coded(group, 100, after);
            }
        }
        return tried;
    };
    CHECK_EQUAL(tried_of(0, 100), 16 + 3);
    CHECK_EQUAL(tried_of(1, 66), 1024);
    // One that becomes shorter makes the group worth trying again.
    while (!choice.wants(0)) {
    }
    choice.told_coded(0, 100, 66);
    CHECK(choice.wants(0));
}

TEST(automatic_codes_nothing_before_the_device_is_known) {
    CodingChoice choice(DiskCoding::automatic);
    CHECK(!choice.wants(0));
    choice.told_read(1 << 20, 1s);
    CHECK(!choice.wants(0));
    choice.told_read(kMuch, 64s);
    CHECK(choice.wants(0));
    CHECK(choice.needs_trial());
}

TEST(automatic_codes_where_reading_less_saves_more_than_decoding_takes) {
    struct Case {
        double reading, decoding;
        bool is_coded;
    };
    for (const Case& one : {Case{0.2, 2, true}, Case{0.5, 2, true}, Case{0.62, 2, false}, Case{3, 2, false},
                            Case{0.5, 0.5, false}, Case{0.1, 0.5, true}}) {
        CodingChoice choice(DiskCoding::automatic);
        choice.told_read(kMuch, at(one.reading));
        choice.told_decoded(kMuch, at(one.decoding));
        CHECK(!choice.needs_trial());
        CHECK_EQUAL(choice.wants(0), one.is_coded);
    }
}

TEST(automatic_follows_the_ratio_of_a_group_and_the_speed_of_the_device) {
    CodingChoice choice(DiskCoding::automatic);
    choice.told_read(kMuch, at(0.3));
    choice.told_decoded(kMuch, at(2));
    CHECK(choice.wants(0));
    for (int i = 0; i < 100; ++i) {
        choice.told_coded(0, 106, 100);
    }
    CHECK(!choice.wants(0));
    CHECK(choice.wants(1));
    for (int i = 0; i < 100; ++i) {
        choice.told_read(kMuch, at(3));
    }
    CHECK(!choice.wants(1));
}

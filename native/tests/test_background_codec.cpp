#include "codec/background_codec.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "check.hpp"
#include "child_process.hpp"
#include "codec_records.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

CodecBytes numbers(std::size_t length) {
    std::mt19937_64 random(length);
    return make_codec_record(RecordKind::bfloat16, length, 64, random);
}

// Returns the niceness of each thread of this process that has this name.
std::vector<int> niceness_of(const std::string& name) {
    std::vector<int> found;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string own;
        std::getline(std::ifstream(task.path() / "comm") >> std::ws, own);
        const std::string number = task.path().filename().string();
        id_t thread = 0;
        std::from_chars(number.data(), number.data() + number.size(), thread);
        if (own == name) {
            found.push_back(getpriority(PRIO_PROCESS, thread));
        }
    }
    return found;
}

}  // namespace

TEST(its_thread_alone_has_a_low_priority) {
    const int own = getpriority(PRIO_PROCESS, 0);
    BackgroundCodec background;
    CHECK(niceness_of("kvoffload-code").empty());
    CHECK(!background.encode(numbers(100000)).empty());
    CHECK(niceness_of("kvoffload-code") == std::vector<int>{std::min(own + 5, 19)});
    CHECK_EQUAL(getpriority(PRIO_PROCESS, 0), own);
}

TEST(records_are_coded_as_by_an_encoder_itself) {
    BackgroundCodec background;
    RecordEncoder encoder;
    for (const std::size_t length : {300000, 0, 64, 5000, 300000}) {
        const CodecBytes record = numbers(length);
        CHECK(std::ranges::equal(background.encode(record), encoder.encode(record)));
    }
    std::mt19937_64 random(1);
    CHECK(background.encode(make_codec_record(RecordKind::random, 100000, 64, random)).empty());
}

TEST(what_is_no_coded_record_is_told_and_others_are_decoded_afterwards) {
    BackgroundCodec background;
    const CodecBytes record = numbers(100000);
    const std::span<const std::uint8_t> made = background.encode(record);
    CodecBytes coded(made.begin(), made.end()), out(record.size());
    CHECK(background.decode(coded, out));
    CHECK(out == record);
    CHECK(!background.decode(std::span(coded).first(coded.size() - 1), out));
    CHECK(!background.decode(coded, std::span(out).first(out.size() - 1)));
    CHECK(background.decode(coded, out));
    CHECK(out == record);
}

TEST(a_forked_child_codes_without_the_thread_and_ends) {
    std::optional<BackgroundCodec> background(std::in_place);
    const CodecBytes record = numbers(100000);
    const std::span<const std::uint8_t> made = background->encode(record);
    const CodecBytes coded(made.begin(), made.end());
    ChildProcess child([&](const Line&) {
        alarm(60);  // one that waits for the thread is killed
        CodecBytes out(record.size());
        const bool is_same = background->decode(coded, out) && out == record;
        background.reset();
        return is_same ? 0 : 1;
    });
    CHECK_EQUAL(child.wait_exit(), 0);
    CHECK(std::ranges::equal(background->encode(record), coded));
}

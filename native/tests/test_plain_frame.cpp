#include "frames/plain_frame.hpp"

#include <vector>

#include "check.hpp"

using namespace kvo::frames;
using kvo::test::fail;

namespace {

std::string hex(std::string_view digits) {
    std::string bytes;
    for (std::size_t at = 0; at + 1 < digits.size(); at += 2) {
        bytes.push_back(static_cast<char>(std::stoi(std::string(digits.substr(at, 2)), nullptr, 16)));
    }
    return bytes;
}

PlainReader reader_of(const std::string& frame) {
    return PlainReader({reinterpret_cast<const std::uint8_t*>(frame.data()), frame.size()});
}

// Returns the result of `read` on a whole frame, of which nothing may be left.
template <typename Read>
auto read_all(const std::string& frame, Read read) {
    PlainReader reader = reader_of(frame);
    try {
        const auto found = read(reader);
        CHECK(reader.at_end());
        return found;
    } catch (const NotPlain&) {
        fail(__FILE__, __LINE__, "a frame of " + std::to_string(frame.size()) + " bytes is refused");
    }
}

template <typename Read>
bool is_refused(const std::string& frame, Read read) {
    PlainReader reader = reader_of(frame);
    try {
        read(reader);
    } catch (const NotPlain&) {
        return true;
    }
    return false;
}

// Refused wherever it is cut off.
template <typename Read>
void check_cuts(const std::string& frame, Read read) {
    for (std::size_t size = 0; size < frame.size(); ++size) {
        // Of its own memory, so that a sanitizer sees what lies behind it.
        const std::vector<std::uint8_t> part(frame.begin(), frame.begin() + static_cast<std::ptrdiff_t>(size));
        PlainReader reader(part);
        bool is_cut_seen = false;
        try {
            read(reader);
        } catch (const NotPlain&) {
            is_cut_seen = true;
        }
        CHECK(is_cut_seen);
    }
}

template <typename Write>
std::string written(Write write) {
    PlainWriter writer;
    write(writer);
    return writer.frame;
}

constexpr auto kReadWhole = [](PlainReader& reader) { return reader.whole(); };
constexpr auto kReadTruth = [](PlainReader& reader) { return reader.truth(); };
constexpr auto kReadBlob = [](PlainReader& reader) { return reader.blob(); };
constexpr auto kReadArray = [](PlainReader& reader) { return reader.array(kArrayItems); };
constexpr auto kSkipOne = [](PlainReader& reader) {
    reader.skip(1);
    return 0;
};

// So many arrays, each in the one before.
std::string nested(std::size_t count) { return std::string(count, '\x91') + '\x05'; }

}  // namespace

TEST(whole_numbers_come_back_in_their_shortest_form) {
    struct Case {
        std::uint64_t value;
        const char* bytes;
    };
    const std::vector<Case> cases = {
        {0, "00"},
        {127, "7f"},
        {128, "cc80"},
        {255, "ccff"},
        {256, "cd0100"},
        {65535, "cdffff"},
        {65536, "ce00010000"},
        {0xffffffff, "ceffffffff"},
        {0x100000000, "cf0000000100000000"},
        {0x0123456789abcdef, "cf0123456789abcdef"},
        {~0ull, "cfffffffffffffffff"},
    };
    for (const auto& [value, bytes] : cases) {
        const std::string frame = written([&](PlainWriter& writer) { writer.whole(value); });
        CHECK_EQUAL(frame, hex(bytes));
        CHECK_EQUAL(read_all(frame, kReadWhole), value);
        read_all(frame, kSkipOne);
        check_cuts(frame, kReadWhole);
        check_cuts(frame, kSkipOne);
    }
    CHECK_EQUAL(read_all(hex("cf0000000000000007"), kReadWhole), 7u);  // longer than it need be
    CHECK_EQUAL(read_all(hex("d07f"), kReadWhole), 127u);              // signed, and not negative
    CHECK_EQUAL(read_all(hex("d100ff"), kReadWhole), 255u);
    CHECK_EQUAL(read_all(hex("d27fffffff"), kReadWhole), 0x7fffffffu);
    CHECK_EQUAL(read_all(hex("d30000000000000007"), kReadWhole), 7u);
    for (const char* other : {"c0", "c2", "c3", "c40100", "ca00000000", "d080", "d1ffff", "d280000000",
                              "d3ffffffffffffffff", "ff", "e0", "a131", "90", "80", "c1"}) {
        CHECK(is_refused(hex(other) + std::string(600, '\0'), kReadWhole));
    }
}

TEST(truths_are_nothing_else) {
    CHECK_EQUAL(read_all(written([](PlainWriter& writer) { writer.truth(true); }), kReadTruth), true);
    CHECK_EQUAL(read_all(written([](PlainWriter& writer) { writer.truth(false); }), kReadTruth), false);
    CHECK_EQUAL(hex("c3"), written([](PlainWriter& writer) { writer.truth(true); }));
    CHECK_EQUAL(hex("c2"), written([](PlainWriter& writer) { writer.truth(false); }));
    for (const char* other : {"00", "01", "c0", "c1", "c4"}) {
        CHECK(is_refused(hex(other) + std::string(600, '\0'), kReadTruth));
    }
    check_cuts(hex("c3"), kReadTruth);
}

TEST(blobs_come_back_at_the_borders_of_their_sizes) {
    struct Case {
        std::size_t size;
        const char* head;
    };
    const std::vector<Case> cases = {{0, "c400"},     {1, "c401"},       {127, "c47f"},         {255, "c4ff"},
                                     {256, "c50100"}, {65535, "c5ffff"}, {65536, "c600010000"}, {300000, "c6000493e0"}};
    for (const auto& [size, head] : cases) {
        std::string bytes(size, '\0');
        for (std::size_t i = 0; i < size; ++i) {
            bytes[i] = static_cast<char>(i * 7);
        }
        const std::string frame = written([&](PlainWriter& writer) { writer.blob(bytes); });
        CHECK_EQUAL(frame, hex(head) + bytes);
        const auto found = read_all(frame, kReadBlob);
        CHECK(std::string(found.begin(), found.end()) == bytes);
        read_all(frame, kSkipOne);
        if (size < 1000) {
            check_cuts(frame, kReadBlob);
            check_cuts(frame, kSkipOne);
        } else {
            CHECK(is_refused(frame.substr(0, frame.size() - 1), kReadBlob));
            CHECK(is_refused(frame.substr(0, frame.size() - 1), kSkipOne));
        }
    }
    CHECK(is_refused(hex("c6ffffffff00"), kReadBlob));
    CHECK(is_refused(hex("c6ffffffff00"), kSkipOne));
    for (const char* other : {"00", "a0", "c3", "c70000", "d900", "90"}) {
        CHECK(is_refused(hex(other) + std::string(600, '\0'), kReadBlob));
    }
}

TEST(text_is_written_at_the_borders_of_its_sizes) {
    struct Case {
        std::size_t size;
        const char* head;
    };
    const std::vector<Case> cases = {{0, "a0"},     {1, "a1"},       {31, "bf"},       {32, "d920"},
                                     {255, "d9ff"}, {256, "da0100"}, {65535, "daffff"}};
    for (const auto& [size, head] : cases) {
        const std::string line(size, 'x');
        const std::string frame = written([&](PlainWriter& writer) { writer.text(line); });
        CHECK_EQUAL(frame, hex(head) + line);
        read_all(frame, kSkipOne);
        CHECK(size == 0 || is_refused(frame.substr(0, frame.size() - 1), kSkipOne));
    }
}

TEST(arrays_have_at_most_255_items_and_as_many_as_are_allowed) {
    for (const auto& [count, head] : {std::pair{0, "90"}, {1, "91"}, {15, "9f"}, {16, "dc0010"}, {255, "dc00ff"}}) {
        const auto items = static_cast<std::size_t>(count);
        const std::string frame = written([&](PlainWriter& writer) { writer.array(items); });
        CHECK_EQUAL(frame, hex(head));
        CHECK_EQUAL(read_all(frame, kReadArray), items);
        CHECK_EQUAL(read_all(frame, [&](PlainReader& reader) { return reader.array(items); }), items);
        CHECK(items == 0 || is_refused(frame, [&](PlainReader& reader) { return reader.array(items - 1); }));
        check_cuts(frame, kReadArray);
    }
    bool is_refused_to_write = false;
    try {
        PlainWriter().array(256);
    } catch (const NotPlain&) {
        is_refused_to_write = true;
    }
    CHECK(is_refused_to_write);
    CHECK_EQUAL(read_all(hex("dd00000003"), kReadArray), 3u);
    for (const char* other :
         {"dc0100", "dcffff", "dd00000100", "ddffffffff", "80", "de0001", "00", "c0", "c401", "a1"}) {
        CHECK(is_refused(hex(other) + std::string(300, '\0'), kReadArray));
    }
    CHECK(is_refused(hex("dc0100") + std::string(300, '\0'), [](PlainReader& reader) { return reader.array(1000); }));
}

TEST(whatever_a_later_version_sends_is_skipped) {
    for (const std::string& item : {std::string("00"),
                                    std::string("7f"),
                                    std::string("e0"),
                                    std::string("ff"),
                                    std::string("c0"),
                                    std::string("c2"),
                                    std::string("c3"),
                                    std::string("cc80"),
                                    std::string("cd8000"),
                                    std::string("ce80000000"),
                                    std::string("cf8000000000000000"),
                                    std::string("d080"),
                                    std::string("d18000"),
                                    std::string("d280000000"),
                                    std::string("d38000000000000000"),
                                    std::string("ca3f800000"),
                                    std::string("cb3ff0000000000000"),
                                    std::string("c400"),
                                    std::string("c40161"),
                                    std::string("c5000161"),
                                    std::string("c60000000161"),
                                    std::string("a0"),
                                    std::string("a161"),
                                    std::string("d900"),
                                    std::string("d90161"),
                                    std::string("da0000"),
                                    std::string("da000161"),
                                    std::string("90"),
                                    std::string("9100"),
                                    std::string("93c0c2c3"),
                                    std::string("dc0000"),
                                    std::string("dc000100"),
                                    std::string("9190"),
                                    std::string("9191a161"),
                                    "bf" + std::string(62, '1')}) {
        const std::string frame = hex(item);
        read_all(frame, kSkipOne);
        check_cuts(frame, kSkipOne);
        // It ends where the next one begins.
        const std::string more = frame + frame + hex("ce01020304");
        PlainReader reader = reader_of(more);
        reader.skip(2);
        CHECK_EQUAL(reader.whole(), 0x01020304u);
    }
    // Not of this protocol: maps, extensions, arrays and texts that are too long, and what is no msgpack.
    for (const char* other : {"80", "8f", "c1", "c70000", "c8000000", "c90000000000", "d400", "d500", "d600", "d700",
                              "d800", "db00000000", "dc0100", "dd00000100", "de0000", "df00000000"}) {
        CHECK(is_refused(hex(other) + std::string(600, '\0'), kSkipOne));
        CHECK(is_refused(hex("91") + hex(other) + std::string(600, '\0'), kSkipOne));
    }
}

TEST(what_is_skipped_is_nested_three_deep_at_most) {
    for (const std::size_t depth : {0u, 1u, 2u, 3u}) {
        read_all(nested(depth), kSkipOne);
    }
    for (const std::size_t depth : {4u, 5u, 1000u, 1000000u}) {
        CHECK(is_refused(nested(depth), kSkipOne));
    }
    // Arrays that are not nested in each other may be many.
    std::string wide = hex("dc00ff");
    for (int i = 0; i < 255; ++i) {
        wide += nested(2);
    }
    read_all(wide, kSkipOne);
    check_cuts(wide, kSkipOne);
    read_all("", [](PlainReader& reader) {
        reader.skip(0);
        return 0;
    });
}

TEST(a_frame_is_read_item_by_item) {
    PlainWriter writer;
    writer.frame = "in front";
    writer.array(5);
    writer.whole(300);
    writer.truth(false);
    writer.blob("abc");
    writer.array(1);
    writer.whole(1);
    writer.text("line");
    CHECK(writer.frame.starts_with("in front"));
    const std::string frame = writer.frame.substr(8);
    const auto read = [](PlainReader& reader) {
        CHECK_EQUAL(reader.array(9), 5u);
        CHECK_EQUAL(reader.whole(), 300u);
        CHECK(!reader.truth());
        const auto found = reader.blob();
        CHECK(std::string(found.begin(), found.end()) == "abc");
        CHECK_EQUAL(reader.array(1), 1u);
        CHECK_EQUAL(reader.whole(), 1u);
        reader.skip(1);
        return 0;
    };
    read_all(frame, read);
    check_cuts(frame, read);
}

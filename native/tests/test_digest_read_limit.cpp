#include "digest/digest_read_limit.hpp"

#include <vector>

#include "check.hpp"

using namespace kvo;

// A limit that leaves out bytes would not be a limit.
TEST(every_byte_is_read) {
    for (const std::size_t length : {1, 7, 8, 255, 256, 257, 700, 1024}) {
        std::vector<std::uint8_t> bytes(length + 1);
        const auto read = std::span(bytes).subspan(1);
        CHECK_EQUAL(read_bytes(read), 0u);
        for (std::size_t i = 0; i < length; ++i) {
            read[i] = 0x80;
            CHECK(read_bytes(read) != 0);
            read[i] = 0;
        }
    }
    CHECK_EQUAL(read_bytes({}), 0u);
}

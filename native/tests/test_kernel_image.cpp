#include "copy/kernel_image.hpp"

#include <cstdint>
#include <cstring>

#include "check.hpp"

using namespace kvo;

TEST(an_image_is_there_exactly_when_its_architectures_are) {
    CHECK_EQUAL(kernel_image().empty(), kernel_archs().empty());
}

TEST(the_image_is_a_fat_binary) {
    if (kernel_image().empty()) {
        return;  // built without nvcc
    }
    constexpr std::uint32_t kFatBinaryMagic = 0xba55ed50;
    std::uint32_t magic = 0;
    CHECK(kernel_image().size() > sizeof magic);
    std::memcpy(&magic, kernel_image().data(), sizeof magic);
    CHECK_EQUAL(magic, kFatBinaryMagic);
}

TEST(architectures_are_named_by_kind_and_number) {
    for (const std::string_view arch : kernel_archs()) {
        CHECK(arch.starts_with("sm_") || arch.starts_with("ptx_"));
        CHECK(arch.find_first_of(",; ") == std::string_view::npos);
    }
}

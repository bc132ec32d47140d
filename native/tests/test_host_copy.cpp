#include "copy/host_copy.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "shim/cpu_features.hpp"

using namespace kvo;

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(std::size_t size, std::mt19937_64& random) {
    Bytes bytes(size);
    std::ranges::generate(bytes, [&] { return static_cast<std::uint8_t>(random()); });
    return bytes;
}

}  // namespace

TEST(the_path_is_what_the_machine_has) {
    CHECK_EQUAL(std::string(stream_paths().back().name), "portable");
    const bool has_avx512 = cpu_features().has(CpuFeature::avx512f);
    CHECK_EQUAL(std::string(stream_path().name) == "avx512", has_avx512);
}

TEST(all_paths_copy_every_length_and_address_and_no_byte_more) {
    std::mt19937_64 random(71);
    const Bytes source = random_bytes(12'000, random);
    for (std::size_t round = 0; round < 1200; ++round) {
        const std::size_t length = round < 400 ? round : random() % 9000;
        const std::size_t from = random() % 70, at = random() % 140, offset = random() % 9000;
        const auto run = std::span(source).subspan(from, length);
        for (const StreamPath& path : stream_paths()) {
            for (const bool has_digest : {false, true}) {
                Bytes expected(length + 200, 0x5a);
                Bytes target = expected;
                std::ranges::copy(run, expected.begin() + static_cast<std::ptrdiff_t>(at));
                if (has_digest) {
                    CHECK(stream_with_digest(target.data() + at, run, offset, path) == digest_run(run, offset));
                } else {
                    stream_copy(target.data() + at, run, path);
                }
                stream_fence();
                CHECK(target == expected);
            }
        }
    }
}

#include "digest/digest_lane.hpp"

#include <algorithm>
#include <array>
#include <random>

#include "check.hpp"
#include "digest_reference.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

std::array<std::uint64_t, kDigestChunkWords> make_keys() {
    std::array<std::uint64_t, kDigestChunkWords> keys{};
    for (std::size_t word = 0; word < keys.size(); ++word) {
        keys[word] = word_key(word);
    }
    return keys;
}

// Computes a digest as a device does, with the lanes in any order.
RunDigest digest_by_lanes(std::span<const std::uint8_t> bytes, std::uint64_t offset, std::uint64_t lanes,
                          std::mt19937_64& random) {
    const auto keys = make_keys();
    std::vector<std::uint64_t> order(lanes);
    for (std::uint64_t lane = 0; lane < lanes; ++lane) {
        order[lane] = lane;
    }
    std::ranges::shuffle(order, random);
    RunDigest total;
    for (const std::uint64_t lane : order) {
        const DigestRun run = {reinterpret_cast<std::uint64_t>(bytes.data()), bytes.size(), offset};
        total = combine(total, digest_lane(run, keys.data(), lane, lanes));
    }
    return total;
}

}  // namespace

TEST(any_number_of_lanes_makes_the_digest_of_the_run) {
    std::mt19937_64 random(33);
    const Bytes memory = random_bytes(40'000, random);
    for (int round = 0; round < 400; ++round) {
        const std::size_t length = round % 2 == 0 ? random() % 300 : random() % 30'000;
        const auto run = std::span(memory).subspan(random() % (memory.size() - length), length);
        const std::uint64_t offset = random() % 4 == 0 ? 16 * (random() % 1000) : random() % (1 << 20);
        const std::uint64_t lanes = round % 3 == 0 ? 32 : 1 + random() % 300;
        CHECK(digest_by_lanes(run, offset, lanes, random) == digest_run(run, offset));
    }
}

// One lane alone adds the most products, of the largest words: a carry that came too late would be lost here.
TEST(a_lane_carries_in_time) {
    std::mt19937_64 random(34);
    const Bytes ones(3 * kDigestChunkBytes, 0xff);
    for (const std::uint64_t lanes : {1, 2, 7, 32}) {
        CHECK(digest_by_lanes(ones, 0, lanes, random) == digest_run_slowly(ones, 0));
    }
}

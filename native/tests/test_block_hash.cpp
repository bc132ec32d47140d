#include "hash/block_hash.hpp"

#include <algorithm>
#include <barrier>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr Digest kNoParent{};

struct Input {
    std::vector<std::uint32_t> tokens;
    std::uint32_t block_size = 16;
    Digest parent = kNoParent;
    Bytes extras;
    std::vector<std::uint64_t> ends;
};

Input make_input(std::size_t token_count, std::uint32_t block_size, std::uint64_t seed, bool has_extras) {
    std::mt19937_64 random(seed);
    Input input;
    input.block_size = block_size;
    input.tokens.resize(token_count);
    std::ranges::generate(input.tokens, [&] { return static_cast<std::uint32_t>(random()); });
    std::ranges::generate(input.parent, [&] { return static_cast<std::uint8_t>(random()); });
    for (std::size_t i = 0; has_extras && i < full_blocks(token_count, block_size); ++i) {
        input.extras.resize(input.extras.size() + random() % 90, static_cast<std::uint8_t>(random()));
        input.ends.push_back(input.extras.size());
    }
    return input;
}

Status run(const Input& input, Bytes& out, const Sha256Path& path = sha256_path()) {
    out.assign(full_blocks(input.tokens.size(), input.block_size) * kDigestBytes, 0xee);
    return hash_blocks(input.tokens, input.block_size, input.parent, {input.extras, input.ends}, out, path);
}

// The definition in the header, written a second time as plainly as can be.
Bytes reference(const Input& input) {
    Bytes out;
    Bytes previous(input.parent.begin(), input.parent.end());
    const auto append_u32 = [](Bytes& message, std::size_t number) {
        for (unsigned shift = 0; shift < 32; shift += 8) {
            message.push_back(static_cast<std::uint8_t>(number >> shift));
        }
    };
    std::uint64_t begin = 0;
    for (std::size_t i = 0; i < full_blocks(input.tokens.size(), input.block_size); ++i) {
        const std::uint64_t end = input.ends.empty() ? 0 : input.ends[i];
        Bytes message = previous;
        append_u32(message, input.block_size);
        append_u32(message, end - begin);
        for (std::size_t t = 0; t < input.block_size; ++t) {
            append_u32(message, input.tokens[i * input.block_size + t]);
        }
        for (std::uint64_t at = begin; at < end; ++at) {
            message.push_back(input.extras[at]);
        }
        const Digest digest = sha256(message, sha256_paths().back());
        previous.assign(digest.begin(), digest.end());
        out.insert(out.end(), digest.begin(), digest.end());
        begin = end;
    }
    return out;
}

void check_refused(const Input& input, const std::string& words) {
    Bytes out;
    const Status status = run(input, out);
    CHECK(status.code() == Code::invalid);
    CHECK(status.message().find(words) != std::string::npos);
    CHECK(std::ranges::all_of(out, [](std::uint8_t byte) { return byte == 0xee; }));
}

}  // namespace

// First in this file, so that the threads also race for the choice of the path.
TEST(threads_hash_concurrently) {
    constexpr std::size_t kThreads = 6;
    const Input input = make_input(640, 16, 1, true);
    std::barrier start(kThreads);
    std::vector<Bytes> outs(kThreads);
    std::vector<Status> statuses(kThreads);
    {
        std::vector<std::jthread> threads;
        for (std::size_t i = 0; i < kThreads; ++i) {
            threads.emplace_back([&, i] {
                start.arrive_and_wait();
                statuses[i] = run(input, outs[i]);
            });
        }
    }
    const Bytes expected = reference(input);
    for (std::size_t i = 0; i < kThreads; ++i) {
        CHECK(statuses[i].ok());
        CHECK(outs[i] == expected);
    }
}

// Made with Python's hashlib. Stored entries bear these names: a change here is a new format version.
TEST(golden_digests) {
    Input input;
    input.block_size = 4;
    input.tokens = {0, 1, 2, 3, 4, 5, 6, 4294967295, 8};
    input.extras = {'l', 'o', 'r', 'a'};
    input.ends = {0, 4};
    Bytes out;
    CHECK(run(input, out).ok());
    std::string hex;
    for (const std::uint8_t byte : out) {
        hex += "0123456789abcdef"[byte >> 4];
        hex += "0123456789abcdef"[byte & 15];
    }
    CHECK_EQUAL(hex,
                "cf0a97ace633179d1c045bce5590bfc2b916cd1bb7d0798642d7a15ea720a138"
                "7cea683523d29ad3ff91da39331074d7eed93d7b354771e43139c167200b15aa");
}

TEST(equals_the_definition_on_every_path) {
    for (const std::uint32_t block_size : {1u, 3u, 16u, 32u, 64u, 128u, 256u}) {
        for (const std::size_t token_count : {0u, 1u, 15u, 16u, 255u, 256u, 257u, 1000u}) {
            for (const bool has_extras : {false, true}) {
                const Input input = make_input(token_count, block_size, block_size + token_count, has_extras);
                const Bytes expected = reference(input);
                for (const Sha256Path& path : sha256_paths()) {
                    Bytes out;
                    CHECK(run(input, out, path).ok());
                    CHECK(out == expected);
                }
            }
        }
    }
}

TEST(a_chain_can_be_continued_where_it_ended) {
    const Input whole = make_input(160, 16, 5, false);
    Bytes digests;
    CHECK(run(whole, digests).ok());

    Input rest = whole;
    rest.tokens.erase(rest.tokens.begin(), rest.tokens.begin() + 64);
    std::copy_n(digests.begin() + 3 * kDigestBytes, kDigestBytes, rest.parent.begin());
    Bytes rest_digests;
    CHECK(run(rest, rest_digests).ok());
    CHECK(std::equal(rest_digests.begin(), rest_digests.end(), digests.begin() + 4 * kDigestBytes, digests.end()));
}

TEST(everything_a_block_depends_on_changes_its_digest) {
    Bytes base, changed;
    const Input input = make_input(32, 16, 6, true);
    CHECK(run(input, base).ok());
    const auto check_changed = [&](auto change) {
        Input other = input;
        change(other);
        CHECK(run(other, changed).ok());
        CHECK(!std::equal(base.end() - kDigestBytes, base.end(), changed.end() - kDigestBytes, changed.end()));
    };
    check_changed([](Input& other) { other.tokens[0] ^= 1; });
    check_changed([](Input& other) { other.tokens[31] ^= 1u << 31; });
    check_changed([](Input& other) { other.parent[31] ^= 1; });
    check_changed([](Input& other) { other.extras.back() ^= 1; });
    check_changed([](Input& other) { other.ends[0] -= 1; });
    check_changed([](Input& other) { other.block_size = 32, other.ends.erase(other.ends.begin()); });
}

TEST(broken_contracts_are_refused_and_nothing_is_written) {
    Input input = make_input(64, 16, 7, false);
    input.ends = {0, 0, 0};
    check_refused(input, "extra_ends has 3 entries, the tokens make 4 full blocks");
    input.ends = {};
    input.extras = {1, 2, 3};
    check_refused(input, "extra_ends has 0 entries");
    input.ends = {1, 2, 1, 3};
    check_refused(input, "1 follows 2");
    input.ends = {1, 2, 3, 4};
    check_refused(input, "not pass the 3 bytes");
    input.ends = {1, 1, 2, 2};
    check_refused(input, "end at 2, extras has 3 bytes");
    input.tokens.resize(15);
    input.ends = {};
    check_refused(input, "no full block");
    input.block_size = 0;
    check_refused(input, "block_size");

    Bytes short_out(kDigestBytes);
    CHECK(!hash_blocks(std::vector<std::uint32_t>(64), 16, kNoParent, {}, short_out).ok());
}

#include "hash/sha256.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

std::span<const std::uint8_t> as_bytes(const std::string& text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::string to_hex(const Digest& digest) {
    std::string hex;
    for (const std::uint8_t byte : digest) {
        hex += "0123456789abcdef"[byte >> 4];
        hex += "0123456789abcdef"[byte & 15];
    }
    return hex;
}

}  // namespace

// The examples published with FIPS 180-4.
TEST(known_answers_on_every_path) {
    const std::vector<std::pair<std::string, std::string>> answers = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
        {std::string(1'000'000, 'a'), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"}};
    for (const Sha256Path& path : sha256_paths()) {
        for (const auto& [text, hex] : answers) {
            CHECK_EQUAL(to_hex(sha256(as_bytes(text), path)), hex);
        }
    }
}

TEST(the_portable_path_is_always_there) {
    CHECK_EQUAL(std::string(sha256_paths().back().name), "portable");
    CHECK_EQUAL(&sha256_path(), &sha256_paths().front());
}

TEST(all_paths_agree_at_every_length_and_alignment) {
    std::mt19937_64 random(11);
    std::vector<std::uint8_t> memory(600);
    std::ranges::generate(memory, [&] { return static_cast<std::uint8_t>(random()); });
    for (std::size_t length = 0; length < 300; ++length) {
        const auto message = std::span<const std::uint8_t>(memory).subspan(length % 17, length);
        const Digest expected = sha256(message, sha256_paths().back());
        for (const Sha256Path& path : sha256_paths()) {
            CHECK(sha256(message, path) == expected);
        }
    }
}

TEST(a_message_padded_in_its_buffer_has_the_same_digest) {
    std::mt19937_64 random(12);
    for (std::size_t length = 0; length < 200; ++length) {
        std::vector<std::uint8_t> buffer(sha256_padded_bytes(length), 0xee);
        std::generate_n(buffer.begin(), length, [&] { return static_cast<std::uint8_t>(random()); });
        const Digest expected = sha256(std::span(buffer).first(length));
        sha256_pad(buffer.data(), length);
        Digest digest{};
        sha256_padded(buffer.data(), buffer.size(), digest);
        CHECK(digest == expected);
    }
}

#include "digest/digest.hpp"

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "check.hpp"
#include "digest/digest_lane.hpp"
#include "digest_reference.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::array<std::uint8_t, 32> kFingerprint = {1, 2, 3};
constexpr std::array<std::uint8_t, 32> kBlockHash = {4, 5, 6};
constexpr RecordName kName = {kFingerprint, kBlockHash, 3, 1};

struct Run {
    std::size_t begin, end;
};

// Cuts [0, length) at `cuts` random places and shuffles the pieces.
std::vector<Run> cut_randomly(std::size_t length, std::size_t cuts, std::mt19937_64& random) {
    std::vector<std::size_t> at = {0, length};
    for (std::size_t i = 0; i < cuts; ++i) {
        at.push_back(random() % (length + 1));
    }
    std::ranges::sort(at);
    std::vector<Run> runs;
    for (std::size_t i = 1; i < at.size(); ++i) {
        runs.push_back({at[i - 1], at[i]});
    }
    std::ranges::shuffle(runs, random);
    return runs;
}

}  // namespace

TEST(the_portable_path_is_always_there) {
    CHECK_EQUAL(std::string(digest_paths().back().name), "portable");
    CHECK_EQUAL(&digest_path(), &digest_paths().front());
}

TEST(all_paths_equal_the_definition_at_every_length_offset_and_address) {
    std::mt19937_64 random(41);
    const Bytes memory = random_bytes(20'000, random);
    for (std::size_t round = 0; round < 900; ++round) {
        const std::size_t length = round < 301 ? round : random() % 600 * (round % 3 == 0 ? 20 : 1);
        const auto run = std::span(memory).subspan(random() % 70, length);
        const std::array<std::uint64_t, 4> offsets = {0, random() % 9000, 16 * (random() % 1000),
                                                      kMaxRecordBytes - length};
        const std::uint64_t offset = offsets[round % offsets.size()];
        const RunDigest expected = digest_run_slowly(run, offset);
        for (const DigestPath& path : digest_paths()) {
            CHECK(digest_run(run, offset, path) == expected);
        }
    }
}

// The largest words: a sum that overflowed would do it here.
TEST(all_paths_carry_in_time) {
    const Bytes ones(5 * kDigestChunkBytes, 0xff);
    const RunDigest expected = digest_run_slowly(ones, 0);
    for (const DigestPath& path : digest_paths()) {
        CHECK(digest_run(ones, 0, path) == expected);
    }
}

TEST(a_copy_has_the_digest_and_the_bytes_and_touches_no_others) {
    std::mt19937_64 random(42);
    const Bytes source = random_bytes(10'000, random);
    for (int round = 0; round < 300; ++round) {
        const std::size_t length = round % 2 == 0 ? random() % 200 : random() % 9000;
        const auto run = std::span(source).subspan(random() % (source.size() - length), length);
        const std::uint64_t offset = random() % 9000;
        const std::size_t at = random() % 70;
        for (const DigestPath& path : digest_paths()) {
            Bytes copy(source.size(), 0xee), expected = copy;
            std::ranges::copy(run, expected.begin() + static_cast<std::ptrdiff_t>(at));
            CHECK(copy_with_digest(copy.data() + at, run, offset, path) == digest_run(run, offset));
            CHECK(copy == expected);
        }
    }
}

TEST(runs_combine_to_the_record_however_it_is_cut) {
    std::mt19937_64 random(43);
    for (int round = 0; round < 300; ++round) {
        const Bytes record = random_bytes(random() % 20'000, random);
        RunDigest total;
        for (const Run& run : cut_randomly(record.size(), random() % 40, random)) {
            total = combine(total, digest_run(std::span(record).subspan(run.begin, run.end - run.begin), run.begin));
        }
        CHECK(total == digest_run(record, 0));
        CHECK_EQUAL(finish(total, kName, record.size()), digest_record(record, kName));
    }
}

TEST(every_single_bit_flip_has_a_digest_of_its_own) {
    std::mt19937_64 random(44);
    Bytes record = random_bytes(4096, random);
    std::set<std::uint64_t> digests = {digest_record(record, kName)};
    for (std::size_t bit = 0; bit < 8 * record.size(); ++bit) {
        record[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        digests.insert(digest_record(record, kName));
        record[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
    }
    CHECK_EQUAL(digests.size(), 8 * record.size() + 1);
}

TEST(every_two_words_that_are_swapped_are_seen) {
    std::mt19937_64 random(45);
    Bytes record = random_bytes(2 * 4096, random);
    const std::uint64_t expected = digest_record(record, kName);
    const auto swap_words = [&](std::size_t a, std::size_t b) {
        std::swap_ranges(&record[8 * a], &record[8 * a] + 8, &record[8 * b]);
    };
    for (std::size_t a = 0; a < record.size() / 8; ++a) {
        for (std::size_t b = a + 1; b < record.size() / 8; b += 1 + random() % 20) {
            swap_words(a, b);
            CHECK(digest_record(record, kName) != expected);
            swap_words(a, b);
        }
    }
}

// Of random, of repeating and of nearly empty records, since structure is what a weak sum would miss.
TEST(larger_damage_is_seen) {
    std::mt19937_64 random(46);
    Bytes repeating(5 * 4096), sparse(5 * 4096);
    for (std::size_t i = 0; i < repeating.size(); ++i) {
        repeating[i] = static_cast<std::uint8_t>(i % 251);
    }
    sparse[4097] = 1;
    for (const Bytes& record : {random_bytes(5 * 4096, random), repeating, sparse}) {
        std::vector<Bytes> damaged;
        for (std::size_t page = 0; page < 4; ++page) {
            const auto begin = static_cast<std::ptrdiff_t>(page * 4096);
            Bytes swapped = record, zeroed = record;
            std::swap_ranges(swapped.begin() + begin, swapped.begin() + begin + 4096, swapped.begin() + begin + 4096);
            std::fill_n(zeroed.begin() + begin, 4096, std::uint8_t{0});
            damaged.insert(damaged.end(), {swapped, zeroed});
        }
        for (const std::ptrdiff_t shift : {1, 8, 64, 4096}) {
            Bytes shifted = record;
            std::ranges::rotate(shifted, shifted.begin() + shift);
            damaged.push_back(shifted);
        }
        for (const std::size_t size : {std::size_t{0}, record.size() - 1, record.size() + 1, 2 * record.size()}) {
            Bytes resized = record;
            resized.resize(size);
            damaged.push_back(resized);
        }
        for (int i = 0; i < 2000; ++i) {
            Bytes burst = record;
            const std::size_t length = 1 + random() % 100;
            const auto at = static_cast<std::ptrdiff_t>(random() % (record.size() - length));
            std::ranges::copy(random_bytes(length, random), burst.begin() + at);
            damaged.push_back(burst);
        }
        for (const Bytes& other : damaged) {
            CHECK_EQUAL(digest_record(other, kName) != digest_record(record, kName), other != record);
        }
    }
}

TEST(every_bit_of_the_name_and_of_the_length_counts) {
    const RunDigest total = {5, 0};
    std::set<std::uint64_t> digests = {finish(total, kName, 4096)};
    for (unsigned bit = 0; bit < 256; ++bit) {
        auto fingerprint = kFingerprint, block_hash = kBlockHash;
        fingerprint[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        block_hash[bit / 8] ^= static_cast<std::uint8_t>(1 << bit % 8);
        digests.insert(finish(total, {fingerprint, kBlockHash, 3, 1}, 4096));
        digests.insert(finish(total, {kFingerprint, block_hash, 3, 1}, 4096));
    }
    for (unsigned bit = 0; bit < 32; ++bit) {
        digests.insert(finish(total, {kFingerprint, kBlockHash, 3u ^ 1u << bit, 1}, 4096));
        digests.insert(finish(total, {kFingerprint, kBlockHash, 3, 1u ^ 1u << bit}, 4096));
    }
    for (unsigned bit = 0; bit < 63; ++bit) {
        digests.insert(finish(total, kName, 4096 ^ std::uint64_t{1} << bit));
    }
    digests.insert(finish(total, {kBlockHash, kFingerprint, 3, 1}, 4096));
    digests.insert(finish(total, {kFingerprint, kBlockHash, 1, 3}, 4096));
    CHECK_EQUAL(digests.size(), 1u + 2 * 256 + 2 * 32 + 63 + 2);
}

// The envelope's bytes as the specification lists them, and a sum that the bytes before them cancel.
TEST(the_digest_that_would_be_zero_is_one) {
    Bytes envelope(kFingerprint.begin(), kFingerprint.end());
    envelope.insert(envelope.end(), kBlockHash.begin(), kBlockHash.end());
    constexpr std::array<std::uint8_t, 24> kFields = {3, 0, 0, 0, 1, 0, 0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 1};
    envelope.insert(envelope.end(), kFields.begin(), kFields.end());
    const RunDigest part = digest_run_slowly(envelope, kMaxRecordBytes);
    CHECK_EQUAL(finish(narrow(kPrime - widen(part)), kName, 4096), 1u);
    CHECK_EQUAL(finish(narrow(kPrime - widen(part) + 1), kName, 4096), digest_field::mix(1));
    CHECK_EQUAL(finish(RunDigest{}, kName, 4096), digest_field::mix(part.low));
}

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

#include "digest/digest_field.hpp"

#include <algorithm>
#include <random>
#include <set>

#include "check.hpp"
#include "digest_reference.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

const std::vector<Wide> kElements = {
    0, 1, 12, 13, 14, 0xffffffff, Wide{1} << 63, kPrime - 14, kPrime - 13, kPrime - 12, kPrime - 2, kPrime - 1};

}  // namespace

TEST(sums_and_products_are_those_of_the_field) {
    std::mt19937_64 random(31);
    std::vector<Wide> elements = kElements;
    for (int i = 0; i < 50; ++i) {
        elements.push_back(random());
    }
    for (const Wide a : elements) {
        for (const Wide b : elements) {
            CHECK(widen(digest_field::add(narrow(a), narrow(b))) == (a + b) % kPrime);
            const auto factor = static_cast<std::uint64_t>(b);
            const auto product = digest_field::multiply(static_cast<digest_field::Signed>(a), factor);
            CHECK(widen(digest_field::reduce(product)) == multiply_slowly(a, factor));
            const auto negative = digest_field::multiply(-static_cast<digest_field::Signed>(a), factor);
            CHECK(widen(digest_field::reduce(negative)) == (kPrime - multiply_slowly(a, factor)) % kPrime);
        }
    }
}

TEST(any_number_is_reduced_to_the_smallest_that_is_congruent) {
    std::mt19937_64 random(32);
    for (int i = 0; i < 10'000; ++i) {
        const Wide wide = (Wide{random()} << 64 | random()) >> (random() % 100 + 9);
        const auto positive = static_cast<digest_field::Signed>(wide);
        CHECK(widen(digest_field::reduce(positive)) == wide % kPrime);
        CHECK(widen(digest_field::reduce(-positive)) == (kPrime - wide % kPrime) % kPrime);
        CHECK(widen(digest_field::reduce(digest_field::shorten(wide))) == wide % kPrime);
    }
    for (const Wide element : kElements) {
        CHECK(widen(digest_field::reduce(static_cast<digest_field::Signed>(element))) == element);
    }
    CHECK(widen(digest_field::reduce(digest_field::kPrime)) == 0);
    CHECK(widen(digest_field::reduce(digest_field::shorten(~Wide{0}))) == ~Wide{0} % kPrime);
}

TEST(word_keys_are_different_and_have_two_limbs_of_28_bits) {
    std::set<std::uint64_t> keys;
    for (std::uint64_t word = 0; word < kDigestChunkWords; ++word) {
        const std::uint64_t key = word_key(word);
        CHECK((key & 0xfffffff) != 0 && (key >> 32) != 0);
        CHECK_EQUAL(key & 0xf0000000f0000000, 0u);
        keys.insert(key);
    }
    CHECK_EQUAL(keys.size(), kDigestChunkWords);
}

// mix() is a bijection with mix(0) = 0, so just one chunk has the multiplier 0: the one whose step undoes the seed.
TEST(no_chunk_that_a_record_can_have_is_multiplied_by_zero) {
    std::uint64_t inverse = 1;
    for (int i = 0; i < 6; ++i) {
        inverse *= 2 - digest_field::kStep * inverse;  // Newton's; each round doubles the bits that are right
    }
    CHECK_EQUAL(inverse * digest_field::kStep, 1u);
    const std::uint64_t zero_chunk = (0 - digest_field::kChunkSeed) * inverse;
    CHECK_EQUAL(chunk_multiplier(zero_chunk), 0u);
    CHECK(zero_chunk > kMaxRecordBytes / kDigestChunkBytes);
}

// No two words of a record have the same factor. This makes it certain that two swapped words are detected.
TEST(all_words_of_32_mib_have_factors_of_their_own) {
    std::vector<std::uint64_t> factors;
    for (std::uint64_t word = 0; word < (std::uint64_t{32} << 20) / kDigestWordBytes; ++word) {
        const digest_field::Unsigned product =
            digest_field::Unsigned{word_key(word % kDigestChunkWords)} * chunk_multiplier(word / kDigestChunkWords);
        const RunDigest factor = digest_field::reduce(digest_field::shorten(product));
        CHECK_EQUAL(factor.high, 0u);  // so that 64 bits are enough to compare
        factors.push_back(factor.low);
    }
    std::ranges::sort(factors);
    CHECK(factors.front() != 0);
    CHECK(std::ranges::adjacent_find(factors) == factors.end());
}

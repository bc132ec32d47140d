#include "mutation.hpp"

#include <array>

namespace kvo::fuzz {
namespace {

constexpr std::size_t kLargest = 1 << 16;
// Where counts, lengths and places go wrong.
constexpr std::array<std::uint64_t, 14> kNumbers = {
    0, 1, 2, 0x3f, 0x7f, 0x80, 0xff, 0x1000, 0xffff, 0x10000, 0x7fffffff, 0xffffffff, 0x100000000, UINT64_MAX};

std::size_t pick(std::size_t bound, std::mt19937_64& random) { return bound == 0 ? 0 : random() % bound; }

auto place(Bytes& bytes, std::size_t at) { return bytes.begin() + static_cast<std::ptrdiff_t>(at); }

void write_number(Bytes& bytes, std::uint64_t number, std::size_t size, std::size_t at) {
    for (std::size_t i = 0; i < size && at + i < bytes.size(); ++i) {
        bytes[at + i] = static_cast<std::uint8_t>(number >> (8 * i));
    }
}

void insert_some(Bytes& bytes, std::span<const std::uint8_t> from, std::mt19937_64& random) {
    const std::size_t begin = pick(from.size(), random);
    const std::size_t size = std::min<std::size_t>(from.size() - begin, 1 + random() % 64);
    const Bytes some(from.begin() + static_cast<std::ptrdiff_t>(begin),
                     from.begin() + static_cast<std::ptrdiff_t>(begin + size));
    bytes.insert(place(bytes, pick(bytes.size() + 1, random)), some.begin(), some.end());
}

void change(Bytes& bytes, std::span<const Bytes> seeds, std::mt19937_64& random) {
    const std::size_t at = pick(bytes.size(), random);
    switch (random() % 8) {
        case 0:
            return insert_some(bytes, bytes, random);
        case 1:
            return insert_some(bytes, seeds[pick(seeds.size(), random)], random);
        case 2: {
            Bytes noise(1 + random() % 16);
            std::ranges::generate(noise, [&] { return static_cast<std::uint8_t>(random()); });
            return insert_some(bytes, noise, random);
        }
        case 3: {
            const std::size_t end = std::min(bytes.size(), at + 1 + random() % 32);
            bytes.erase(place(bytes, at), place(bytes, end));
            return;
        }
        case 4:
            return write_number(bytes, kNumbers[random() % kNumbers.size()], std::size_t{1} << random() % 4, at);
        case 5:
            return write_number(bytes, random(), std::size_t{1} << random() % 4, at);
        default:
            if (!bytes.empty()) {
                bytes[at] ^= static_cast<std::uint8_t>(1U << random() % 8);
            }
    }
}

}  // namespace

Bytes mutate(std::span<const Bytes> seeds, std::mt19937_64& random) {
    Bytes bytes = seeds[pick(seeds.size(), random)];
    for (std::uint64_t changes = 1 + random() % 8; changes > 0; --changes) {
        change(bytes, seeds, random);
    }
    bytes.resize(std::min(bytes.size(), kLargest));
    return bytes;
}

}  // namespace kvo::fuzz

// The protocol's messages as the express channel has them: numbers, fields and frames.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "frames/plain_frame.hpp"

namespace kvo::express {

static_assert(std::endian::native == std::endian::little, "numbers lie in blobs as the protocol has them");

constexpr std::size_t kLengthBytes = 4;

// The numbers of kvoffload/protocol.
enum Op : std::uint64_t {
    kAcquire = 4,
    kAcquireEntries = 5,
    kCredits = 6,
    kMark = 11,
    kPublish = 32,
    kAbort = 33,
    kRelease = 34,
    kInvalidate = 36,
    kError = 64,
    kDone = 65,
    kAcquired = 68,
    kCreditsGranted = 69,
};

enum ErrorCode : std::uint64_t {
    kMalformed = 1,
    kTooLarge = 2,
    kUnknownOperation = 3,
    kNoSession = 7,
    kNotFound = 11,
    kDraining = 13,
    kOutOfOrder = 14,
    kInternal = 15,
};

// Why a message is not served.
struct Refusal {
    ErrorCode code;
    std::string line;
};

inline std::uint64_t at_most(std::uint64_t value, std::uint64_t limit) {
    if (value > limit) {
        throw frames::NotPlain{};
    }
    return value;
}

// A message's fields in their order, whatever comes before them.
class Fields {
public:
    Fields(frames::PlainReader& reader, std::size_t count) : reader_(reader), left_(count) {}

    // Those that every sender has.
    void take(std::size_t count) {
        if (left_ < count) {
            throw frames::NotPlain{};
        }
        left_ -= count;
    }
    // Whether there is one more.
    bool next() { return left_ > 0 && left_-- > 0; }
    // Behind them is nothing but what a later version added.
    void end() {
        reader_.skip(left_);
        if (!reader_.at_end()) {
            throw frames::NotPlain{};
        }
    }

    std::uint64_t whole(std::uint64_t limit = UINT64_MAX) { return at_most(reader_.whole(), limit); }

    // Values of one size, `limit` at most.
    std::span<const std::uint8_t> blob(std::size_t item_bytes, std::size_t limit) {
        const std::span<const std::uint8_t> bytes = reader_.blob();
        if (bytes.size() % item_bytes != 0 || bytes.size() / item_bytes > limit) {
            throw frames::NotPlain{};
        }
        return bytes;
    }

    std::vector<std::uint64_t> numbers(std::size_t limit) {
        const std::span<const std::uint8_t> bytes = blob(sizeof(std::uint64_t), limit);
        std::vector<std::uint64_t> found(bytes.size() / sizeof(std::uint64_t));
        if (!found.empty()) {
            std::memcpy(found.data(), bytes.data(), bytes.size());
        }
        return found;
    }

    std::vector<std::uint32_t> shards(std::size_t limit) {
        std::vector<std::uint32_t> found(reader_.array(limit));
        for (std::uint32_t& shard : found) {
            shard = static_cast<std::uint32_t>(whole(UINT16_MAX));
        }
        return found;
    }

private:
    frames::PlainReader& reader_;
    std::size_t left_;
};

inline std::string_view bytes_of(const std::vector<std::uint64_t>& numbers) {
    return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::uint64_t)};
}

// Puts one frame of so many items behind `out`, behind its length.
template <typename Write>
void write_frame(std::string& out, std::size_t items, Write write) {
    frames::PlainWriter writer;
    writer.frame = std::move(out);
    const std::size_t start = writer.frame.size();
    writer.frame.append(kLengthBytes, '\0');
    writer.array(items);
    write(writer);
    const auto size = static_cast<std::uint32_t>(writer.frame.size() - start - kLengthBytes);
    std::memcpy(writer.frame.data() + start, &size, sizeof(size));
    out = std::move(writer.frame);
}

}  // namespace kvo::express

// The parts of every fuzz target: inputs that the real writers make, and one function that must survive any bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace kvo::fuzz {

using Bytes = std::vector<std::uint8_t>;

// Each is read to its end, and leads far into the decoder.
std::vector<Bytes> make_seeds();

// Throws where an invariant is broken; what breaks more is the sanitizers' to see.
void run(std::span<const std::uint8_t> input);

// Reads an input from its first byte on. After its end it reads zeros.
class Input {
public:
    explicit Input(std::span<const std::uint8_t> bytes) : left_(bytes) {}

    bool is_empty() const { return left_.empty(); }

    std::span<const std::uint8_t> take(std::size_t size) {
        const std::span<const std::uint8_t> taken = left_.first(std::min(size, left_.size()));
        left_ = left_.subspan(taken.size());
        return taken;
    }

    template <typename Number>
    Number number() {
        static_assert(std::is_trivially_copyable_v<Number>);
        Number value{};
        const std::span<const std::uint8_t> bytes = take(sizeof(value));
        std::ranges::copy(bytes, reinterpret_cast<std::uint8_t*>(&value));
        return value;
    }
    std::uint8_t byte() { return number<std::uint8_t>(); }

private:
    std::span<const std::uint8_t> left_;
};

// The other way round.
class Output {
public:
    template <typename Number>
    Output& number(Number value) {
        const auto* const bytes = reinterpret_cast<const std::uint8_t*>(&value);
        bytes_.insert(bytes_.end(), bytes, bytes + sizeof(value));
        return *this;
    }
    Output& add(std::span<const std::uint8_t> bytes) {
        bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
        return *this;
    }
    const Bytes& bytes() const { return bytes_; }

private:
    Bytes bytes_;
};

}  // namespace kvo::fuzz

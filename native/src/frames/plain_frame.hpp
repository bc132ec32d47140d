// The control frames' msgpack, as far as it is plain: arrays of whole numbers, truths, byte strings and text, without
// anything unusual in it. The other part is the codec's in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace kvo::frames {

// Thrown for a frame that this code does not handle: a wrong one, or a correct but unusual one.
struct NotPlain {};

constexpr std::size_t kArrayItems = 255;

// Reads a frame's values in order, from its first byte on.
class PlainReader {
public:
    explicit PlainReader(std::span<const std::uint8_t> bytes) : at_(bytes.data()), end_(at_ + bytes.size()) {}

    bool at_end() const { return at_ == end_; }

    // How many items follow.
    std::size_t array(std::size_t limit) {
        const std::uint8_t mark = *take(1);
        const std::uint64_t count = (mark & 0xf0) == 0x90 ? mark & 0x0f
                                    : mark == 0xdc        ? number(2)
                                    : mark == 0xdd        ? number(4)
                                                          : kArrayItems + 1;
        if (count > kArrayItems || count > limit) {
            throw NotPlain{};
        }
        return static_cast<std::size_t>(count);
    }

    std::uint64_t whole() {
        const std::uint8_t mark = *take(1);
        if (mark < 0x80) {
            return mark;
        }
        if (mark < 0xcc || mark > 0xd3) {
            throw NotPlain{};
        }
        const std::size_t size = std::size_t{1} << (mark & 3);
        const std::uint64_t value = number(size);
        if (mark >= 0xd0 && value >> (8 * size - 1) != 0) {
            throw NotPlain{};  // negative
        }
        return value;
    }

    bool truth() {
        const std::uint8_t mark = *take(1);
        if (mark != 0xc2 && mark != 0xc3) {
            throw NotPlain{};
        }
        return mark == 0xc3;
    }

    std::span<const std::uint8_t> blob() {
        const std::uint8_t mark = *take(1);
        if (mark < 0xc4 || mark > 0xc6) {
            throw NotPlain{};
        }
        const auto size = static_cast<std::size_t>(number(std::size_t{1} << (mark - 0xc4)));
        return {take(size), size};
    }

    // Skips values of any kind that a later version appended to those that this one knows.
    void skip(std::size_t count, int depth = 4) {
        if (depth == 0) {
            throw NotPlain{};
        }
        for (; count > 0; --count) {
            const std::uint8_t mark = *at_or_throw();
            if ((mark & 0xf0) == 0x90 || mark == 0xdc || mark == 0xdd) {
                skip(array(kArrayItems), depth - 1);
            } else if (mark >= 0xc4 && mark <= 0xc6) {
                blob();
            } else {
                skip_one(*take(1));
            }
        }
    }

private:
    const std::uint8_t* at_or_throw() const {
        if (at_ == end_) {
            throw NotPlain{};
        }
        return at_;
    }

    const std::uint8_t* take(std::size_t size) {
        if (static_cast<std::size_t>(end_ - at_) < size) {
            throw NotPlain{};
        }
        return std::exchange(at_, at_ + size);
    }

    void skip_one(std::uint8_t mark) {
        if (mark < 0x80 || mark >= 0xe0 || mark == 0xc0 || mark == 0xc2 || mark == 0xc3) {
            return;
        }
        if ((mark & 0xe0) == 0xa0) {
            take(mark & 0x1f);
        } else if (mark >= 0xcc && mark <= 0xd3) {
            take(std::size_t{1} << (mark & 3));
        } else if (mark == 0xca || mark == 0xcb) {
            take(mark == 0xca ? 4 : 8);
        } else if (mark == 0xd9 || mark == 0xda) {
            take(static_cast<std::size_t>(number(mark == 0xd9 ? 1 : 2)));
        } else {
            throw NotPlain{};
        }
    }

    std::uint64_t number(std::size_t size) {
        std::uint64_t value = 0;
        for (const std::uint8_t* byte = take(size); size-- > 0; ++byte) {
            value = value << 8 | *byte;
        }
        return value;
    }

    const std::uint8_t* at_;
    const std::uint8_t* end_;
};

// Appends values to `frame`, each in its shortest form, as Python's msgpack writes it.
class PlainWriter {
public:
    void array(std::size_t count) {
        if (count > kArrayItems) {
            throw NotPlain{};
        }
        if (count < 16) {
            byte(0x90 | count);
        } else {
            byte(0xdc);
            number(count, 2);
        }
    }

    void whole(std::uint64_t value) {
        if (value < 0x80) {
            byte(value);
            return;
        }
        const unsigned power = value <= 0xff ? 0 : value <= 0xffff ? 1 : value <= 0xffffffff ? 2 : 3;
        byte(0xcc + power);
        number(value, std::size_t{1} << power);
    }

    void truth(bool value) { byte(value ? 0xc3 : 0xc2); }

    void blob(std::string_view bytes) {
        const unsigned power = bytes.size() <= 0xff ? 0 : bytes.size() <= 0xffff ? 1 : 2;
        byte(0xc4 + power);
        number(bytes.size(), std::size_t{1} << power);
        frame.append(bytes);
    }

    // Writes a text of at most 65,535 bytes.
    void text(std::string_view line) {
        if (line.size() < 32) {
            byte(0xa0 | line.size());
        } else {
            const unsigned power = line.size() <= 0xff ? 0 : 1;
            byte(0xd9 + power);
            number(line.size(), std::size_t{1} << power);
        }
        frame.append(line);
    }

    std::string frame;

private:
    void byte(std::uint64_t value) { frame.push_back(static_cast<char>(value)); }

    void number(std::uint64_t value, std::size_t size) {
        while (size-- > 0) {
            byte(value >> (8 * size) & 0xff);
        }
    }
};

}  // namespace kvo::frames

// Which records of a device are coded: a planner that is told what coding and reading took.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace kvo {

enum class DiskCoding : std::uint8_t {
    off,        // what is coded is read all the same
    on,         // every record that becomes shorter
    automatic,  // on while the device is measured to be so slow that coded records come sooner
};

// For the device's thread.
class CodingChoice {
public:
    using Time = std::chrono::nanoseconds;

    explicit CodingChoice(DiskCoding coding) : coding_(coding) {}

    // Whether a record of this group is to be tried now. A group whose records do not become shorter is tried rarely.
    bool wants(std::uint32_t group);
    void told_coded(std::uint32_t group, std::uint64_t before, std::uint64_t after);
    void told_decoded(std::uint64_t bytes, Time taken) { decoding_.add(bytes, taken); }
    void told_read(std::uint64_t bytes, Time taken) { reading_.add(bytes, taken); }

    // Whether nothing has been decoded yet, by which `automatic` knows how fast it is.
    bool needs_trial() const noexcept { return coding_ == DiskCoding::automatic && decoding_.bytes == 0; }

private:
    struct Speed {
        double bytes = 0;
        double seconds = 0;

        void add(std::uint64_t more, Time taken);
        double rate() const { return seconds > 0 ? bytes / seconds : 0; }
    };
    struct Group {
        double ratio = 1.5;  // until it is known
        std::uint32_t failures = 0;
        std::uint32_t skipped = 0;
    };

    bool is_faster(const Group& group) const;
    Group& group_of(std::uint32_t number) { return groups_[number % groups_.size()]; }

    const DiskCoding coding_;
    std::array<Group, 64> groups_{};
    Speed decoding_, reading_;
};

}  // namespace kvo

// Decides which records of a device are coded. The device tells this planner how long coding and reading took.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>

namespace kvo {

enum class DiskCoding : std::uint8_t {
    off,        // writes plain records; coded ones can still be read
    on,         // every record that becomes shorter
    automatic,  // while coded records are measured to be read sooner than plain ones
};

// For the device's thread.
class CodingChoice {
public:
    using Time = std::chrono::nanoseconds;

    static constexpr std::uint64_t kKnownBytes = std::uint64_t{16} << 20;  // bytes to read before a speed counts
    // After so many bytes kKnownBytes go the other way: what is faster may have been measured at a bad moment. Then
    // after twice as many, and so on, up to every kTrialEveryBytes: it may have changed.
    static constexpr std::uint64_t kFirstTrialBytes = 16 * kKnownBytes;
    static constexpr std::uint64_t kTrialEveryBytes = 128 * kKnownBytes;
    static constexpr std::uint64_t kBehindBytes = std::uint64_t{32} << 20;

    explicit CodingChoice(DiskCoding coding) : coding_(coding) {}

    // Whether to try coding a record of this group now. A group whose records do not become shorter is tried rarely.
    bool wants(std::uint32_t group, std::uint64_t length);
    void told_coded(std::uint32_t group, std::uint64_t before, std::uint64_t after);
    void told_decoded(std::uint64_t bytes, Time taken) { decoding_.add(bytes, taken); }
    // Records of so many bytes were read in a period. A period in which many records of both kinds were read is not
    // counted.
    void told_read(std::uint64_t plain, std::uint64_t coded, Time taken);
    // So many bytes wait to be written because of coding, after a step. If they are many, the next step codes nothing:
    // it writes as much as the device takes.
    void told_waiting(std::uint64_t bytes) { is_behind_ = bytes >= kBehindBytes; }

    // Whether nothing has been decoded yet, by which `automatic` knows how fast it is.
    bool needs_trial() const noexcept { return coding_ == DiskCoding::automatic && decoding_.bytes == 0; }

private:
    struct Speed {
        double bytes = 0;
        double seconds = 0;

        void add(std::uint64_t more, Time taken);
        double rate() const { return seconds > 0 ? bytes / seconds : 0; }
        bool is_known() const { return bytes >= static_cast<double>(kKnownBytes); }
    };
    struct Group {
        double ratio = 1.5;  // until it is known
        std::uint32_t failures = 0;
        std::uint32_t skipped = 0;
    };

    bool chooses(const Group& group, std::uint64_t length);
    bool comes_sooner(const Group& group) const;
    Group& group_of(std::uint32_t number) { return groups_[number % groups_.size()]; }

    const DiskCoding coding_;
    std::array<Group, 64> groups_{};
    Speed plain_, coded_;  // of reading until records are verified and decoded, in bytes of records
    Speed decoding_;
    std::uint64_t asked_bytes_ = 0, trial_at_bytes_ = kFirstTrialBytes;
    bool is_behind_ = false;
};

}  // namespace kvo

// Evicts segments of a device, so that there is always an empty one to write to.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "disk/device_condition.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/recovery.hpp"
#include "disk/segment_files.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

// Decides which segment to evict, and how many of its records to keep.

struct Candidate {
    std::uint32_t segment = 0;
    std::uint64_t generation = 0;
    std::uint64_t live_bytes = 0;
    std::uint64_t hot_bytes = 0;
};

// Chooses from the older half, so that new records have had time to be read: the segment with the fewest bytes worth
// keeping for its age, where a hot byte counts four times and the age is in segments. So a segment with a few hot
// records does not stay for ever: these are moved, and the rest is evicted.
std::optional<Candidate> choose_victim(std::span<Candidate> candidates);

// Bytes of records that may be written again to keep them. It grows by a share of the bytes put, up to a limit, so
// moves stay in proportion to puts.
class MoveAllowance {
public:
    MoveAllowance(double share, std::uint64_t limit_bytes) : share_(share), limit_(static_cast<double>(limit_bytes)) {}

    void add_put(std::uint64_t bytes);
    bool take(std::uint64_t bytes);  // false: too little is left, and nothing is taken

private:
    double share_;
    double limit_;
    double left_ = 0;
};

// Records that are kept when their segment goes: read a few at a time, and put again.
//
// For the device's thread. Moves by batches of the device's own, through `get` and `put`; one at a time.
class Mover {
public:
    using Give = std::function<void(const BatchPointer&)>;

    Mover(std::vector<FooterEntry> entries, Give get, Give put, Give remove, std::function<Instant()> deadline);

    // Goes on with what has ended. True: all is done, or could not be.
    bool step();
    std::uint64_t moved_bytes() const noexcept { return moved_bytes_; }

private:
    void begin_get();
    void begin_put();

    std::vector<FooterEntry> entries_;
    const Give get_;
    const Give put_;
    const Give remove_;
    const std::function<Instant()> deadline_;
    std::size_t next_ = 0;
    BatchPointer batch_;
    std::shared_ptr<AlignedMemory> memory_;
    std::uint64_t moved_bytes_ = 0;
};

// The parts that the evictor works on. All of them outlive it.
struct EvictorSeat {
    const DeviceTerms& terms;
    SegmentFiles& files;
    SegmentIo io;
    SharedIndex& index;
    DeviceCounts& counts;
    const DeviceCondition& condition;
    std::function<void(const BatchPointer&)> give;  // a batch of records that are moved
};

// For the device's thread.
class DeviceEvictor {
public:
    explicit DeviceEvictor(EvictorSeat seat);

    // Continues the eviction under way, and begins another one while too few segments are empty.
    void pump();
    // Stops the eviction under way; its segment stays.
    void stop();

    bool is_moving() const noexcept { return mover_.has_value(); }
    bool is_under_way() const noexcept { return mover_ || leaving_; }
    // Notes that so many bytes were put. A share of them may be used to move records.
    void add_put(std::uint64_t bytes) { allowance_.add_put(bytes); }

private:
    void begin();
    std::vector<FooterEntry> choose_moves(std::uint32_t number);
    void end();

    EvictorSeat seat_;
    MoveAllowance allowance_;
    std::optional<std::uint32_t> leaving_;
    std::optional<Mover> mover_;
};

}  // namespace kvo

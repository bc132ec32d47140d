// What reads that failed say of a record, a segment and the device. Records that are lost are written to be lost as
// well, or they would be back after a restart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "disk/device_condition.hpp"
#include "disk/device_reader.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/io_runner.hpp"
#include "disk/segment_files.hpp"

namespace kvo {

// What it works on, all of which outlives it.
struct LossesSeat {
    const DeviceTerms& terms;
    IoRunner& runner;
    SegmentFiles& files;
    SharedIndex& index;
    DeviceCounts& counts;
    DeviceCondition& condition;
    std::function<void(const BatchPointer&)> give;  // a batch of removals, to be written
};

// For the device's thread.
class DeviceLosses {
public:
    explicit DeviceLosses(LossesSeat seat) : seat_(std::move(seat)) {}

    // A read of the segment failed by this errno; 0: one succeeded.
    void told_read(std::uint32_t segment, int error);
    // What was damaged, which 0 says, is lost. What could not be read is once something else can: else it is the device
    // that has gone.
    void told_lost(const LostRecord& record, int error);
    // The batch's removal found no room in the segment that goes. It is written to the next one.
    void told_left_out(const BatchPointer& batch, std::uint32_t item);

    // A batch at a time; what is not written is kept for the next one.
    void pump();

    void begin() { failed_reads_ = 0; }             // the folder was opened
    void forget_suspects() { suspected_.clear(); }  // it was not they

private:
    void count_failed_read(std::uint32_t segment, int error);
    void note(const LostRecord& record);
    void read_something_else(std::uint32_t segment);
    void confirm(std::size_t count);
    void forget(const LostRecord& record);

    const LossesSeat seat_;
    std::uint32_t failed_reads_ = 0;  // in a row
    std::vector<LostRecord> suspected_;
    bool is_asking_ = false;  // whether they are the only ones
    std::vector<LostRecord> lost_;
    BatchPointer batch_;  // of the first of `lost_`
};

}  // namespace kvo

// Decides from failed reads whether a record, a segment or the whole device is lost. For each lost record it writes a
// removal, since the record would be back after a restart otherwise.
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

// The parts that it works on. All of them outlive it.
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

    // A read of the segment failed with this errno, or succeeded if it is 0.
    void told_read(std::uint32_t segment, int error);
    // A record could not be read (`error` is an errno) or was damaged (0). A damaged record is lost at once. One that
    // could not be read is lost once another read succeeds; if none does, the device itself is gone.
    void told_lost(const LostRecord& record, int error);
    // The batch's removal found no room while its segment was evicted. It is written to the next segment instead.
    void told_left_out(const BatchPointer& batch, std::uint32_t item);

    // Writes removals, one batch at a time; those that were not written go into the next batch.
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

// The segments that a device writes to: the open one, and those behind it that become durable.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "disk/device_condition.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/io_runner.hpp"
#include "disk/segment_files.hpp"
#include "disk/segment_writer.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

// The parts that OpenSegments works on. All of them outlive it.
struct OpenSeat {
    const DeviceTerms& terms;
    IoRunner& runner;
    SegmentFiles& files;
    SharedIndex& index;
    DeviceCounts& counts;
    DeviceCondition& condition;
};

// For the device's thread. Records that are written are in the index, and their items have ended, except those that
// must be durable first.
class OpenSegments {
public:
    OpenSegments(const OpenSeat& seat, AlignedMemory memory);

    // Whether a record of this length can be appended to the open segment; the call may open another one for it. False:
    // the record must wait for buffers or for an empty segment. The last empty segment is kept for moves, which empty
    // others.
    bool make_room(std::uint64_t length, bool is_move);
    // Whether no record can be appended until a segment has been evicted.
    bool has_no_room() const { return !writer_ && seat_.files.empty_count() == 0; }

    // The same as SegmentWriter's, for the open segment.
    bool append(const BatchPointer& batch, std::uint32_t item, const StoredForm& form) {
        return writer_->append(batch, item, form);
    }
    void append_removal(const BatchPointer& batch, std::uint32_t item) { writer_->append_removal(batch, item); }

    bool has_appended(const KeyMark& mark) const;  // and not written
    // Ends the item of a record that is there: at once, or when it is durable if that is wanted.
    void end_present(const BatchPointer& batch, std::uint32_t item, const RecordPlace& place);
    // The records that were appended to a segment while it is still being written.
    std::vector<FooterEntry> entries(std::uint32_t segment) const;

    // Sends and synchronizes what is due, and lets go of segments that are done.
    void maintain(Instant now);
    Instant next_wake() const;

    // No record follows in the open segment.
    void seal();
    // Stops writing. Items that are not durable yet end with `outcome`; durable records stay readable.
    void drop(DiskOutcome outcome);
    // Whether no segment but the open one is written.
    bool are_sealed() const noexcept { return sealing_.empty(); }
    void abandon_memory() noexcept { pool_.abandon(); }

private:
    bool begin(bool is_move);
    void begin_writer(std::uint32_t number);
    void told_written(const AppendedRecord& record);
    void told_failed(std::uint32_t segment, const std::string& what);
    const SegmentWriter* writer_of(std::uint32_t segment) const;

    const OpenSeat seat_;
    BufferPool pool_;
    std::unique_ptr<SegmentWriter> writer_;
    std::vector<std::unique_ptr<SegmentWriter>> sealing_;  // and those that have failed and still have I/O under way
};

}  // namespace kvo

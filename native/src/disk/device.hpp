// One device of the disk tier: a folder of segments, an index, an I/O engine, and what is done when they fail.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "codec/record_codec.hpp"
#include "disk/buffer_pool.hpp"
#include "disk/coding_choice.hpp"
#include "disk/device_condition.hpp"
#include "disk/device_reader.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/io_runner.hpp"
#include "disk/mover.hpp"
#include "disk/segment_files.hpp"
#include "disk/segment_writer.hpp"
#include "disk/victim.hpp"

namespace kvo {

struct DevicePart {
    BatchPointer batch;
    std::vector<std::uint32_t> items;
};

// `step` and everything that is not said to be for any thread is the device thread's. A step waits for files where the
// folder is opened, recovered, probed or given a new segment; records wait for no step: their deadlines are the
// batch's, told by whoever asked.
class Device {
public:
    // Code::invalid: the terms cannot be kept. Code::failed: no memory or I/O engine is to be had. The folder is opened
    // by the first step.
    static Result<std::unique_ptr<Device>> create(DeviceTerms terms);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // By any thread.
    bool contains(const KeyMark& mark);
    bool can_read() const noexcept { return condition_.can_read(); }
    bool can_write() const noexcept { return condition_.can_write(); }
    DeviceHealth health() { return condition_.health(); }

    // Takes the part. What of it cannot be done ends at once.
    void add(DevicePart part);

    // Does what can be done now; when to come again at the latest, unless `file` becomes readable before.
    Instant step();
    int file() const noexcept { return runner_.queue().file(); }

    // Writes what waits, with the footer, and closes the folder. False: I/O is still under way after the timeout, and
    // its memory is left behind.
    bool close(int timeout_ms);

    // The records of the segment with this number, for `scan`; none if there are none or they cannot be read.
    std::vector<FooterEntry> list_segment(std::uint32_t number);
    std::uint32_t segment_count() const noexcept { return files_.count(); }

private:
    Device(DeviceTerms terms, std::unique_ptr<IoEngine> engine, AlignedMemory read_memory, AlignedMemory write_memory);

    // Parts and the number of their next item, in order; removals too. Moves first: room for the others comes by them.
    struct WriteQueue {
        std::deque<DevicePart> parts;
        std::size_t next = 0;
    };

    void add_all(const BatchPointer& batch);

    // device_state.cpp
    void look_after(Instant now);
    void open();
    void become_read_only(const std::string& reason);
    void become_absent(const std::string& reason);
    void told_read(std::uint32_t segment, int error);
    void count_failed_read(std::uint32_t segment, int error);
    void publish();

    // device_losses.cpp
    void told_lost(const LostRecord& record, int error);
    void read_something_else(std::uint32_t segment);
    void note_lost(const LostRecord& record);
    void confirm_lost(std::size_t count);
    void forget_lost(const LostRecord& record);
    void pump_losses();

    // device_writes.cpp
    void pump_writes();
    void pump(WriteQueue& queue);
    void give_up(WriteQueue& queue, DiskOutcome outcome);
    bool write_item(const BatchPointer& batch, std::uint32_t item);
    bool write_removal(const BatchPointer& batch, std::uint32_t item);
    bool is_appended(const KeyMark& mark) const;
    bool end_without_room(const BatchPointer& batch, std::uint32_t item);
    std::span<const std::uint8_t> code(const DiskItem& item);
    bool end_present(const BatchPointer& batch, std::uint32_t item, const RecordPlace& place);
    bool has_writer_for(std::uint64_t length, bool is_move);
    bool begin_segment(bool is_move);
    void begin_writer(std::uint32_t number);
    void drop_writers(DiskOutcome outcome);
    void told_written(const AppendedRecord& record);
    void told_failed(std::uint32_t segment, const std::string& what);
    void end_writers();

    // device_eviction.cpp
    void pump_eviction();
    void begin_eviction();
    std::vector<FooterEntry> choose_moves(std::uint32_t number);
    void end_eviction();

    const DeviceTerms terms_;
    IoRunner runner_;
    BufferPool read_pool_;
    BufferPool write_pool_;
    DeviceCondition condition_;
    DeviceCounts counts_;
    SegmentFiles files_;
    SharedIndex index_;
    MoveAllowance moves_allowed_;

    CodingChoice coding_;
    RecordEncoder encoder_;
    std::uint64_t coded_in_step_ = 0;  // bytes of records that were tried

    std::unique_ptr<DeviceReader> reader_;
    std::unique_ptr<SegmentWriter> writer_;
    std::vector<std::unique_ptr<SegmentWriter>> sealing_;  // and those that have failed and still have I/O under way
    WriteQueue moves_;
    WriteQueue puts_;
    std::optional<std::uint32_t> leaving_;
    std::optional<Mover> mover_;
    std::vector<LostRecord> suspected_;
    bool is_asking_ = false;  // whether they are the only ones
    std::vector<LostRecord> lost_;
    BatchPointer loss_batch_;         // of the first of `lost_`
    std::uint32_t failed_reads_ = 0;  // in a row
};

}  // namespace kvo

// The writes of a device: what becomes of records that are put, moved or removed, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "codec/record_codec.hpp"
#include "disk/coding_choice.hpp"
#include "disk/device_condition.hpp"
#include "disk/device_evictor.hpp"
#include "disk/device_losses.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/open_segments.hpp"
#include "disk/segment_files.hpp"

namespace kvo {

// Codes and seals records on their way to a segment.
//
// For the device's thread.
class RecordCoder {
public:
    // All outlive it.
    RecordCoder(const DeviceTerms& terms, CodingChoice& choice, DeviceCounts& counts)
        : terms_(terms), choice_(choice), counts_(counts) {}

    // Returns the form in which the item's record is written, valid until the next call. None: it cannot be sealed.
    std::optional<StoredForm> code(const DiskItem& item);

    // Coding takes time, and reads go first, so each step codes a limited number of bytes.
    void begin_step() { tried_bytes_ = 0; }
    bool has_coded_enough() const noexcept { return tried_bytes_ >= kCodedBytesAStep; }

private:
    std::span<const std::uint8_t> encode(const DiskItem& item);

    const DeviceTerms& terms_;
    CodingChoice& choice_;
    DeviceCounts& counts_;
    RecordEncoder encoder_;
    std::vector<std::uint8_t> sealed_;
    std::uint64_t tried_bytes_ = 0;
};

// The parts that the writer works on. All of them outlive it.
struct DeviceWriterSeat {
    const DeviceTerms& terms;
    SegmentFiles& files;
    SharedIndex& index;
    DeviceCounts& counts;
    const DeviceCondition& condition;
    DeviceEvictor& evictor;
    DeviceLosses& losses;
    OpenSegments& open;
    CodingChoice& coding;
};

// For the device's thread.
class DeviceWriter {
public:
    explicit DeviceWriter(const DeviceWriterSeat& seat);

    // Puts and removals of a batch.
    void add(DevicePart part);

    // Goes on until something must wait: for a buffer, for a segment to be empty, or for reads behind so much coding.
    void pump();
    bool has_coded_enough() const noexcept { return coder_.has_coded_enough(); }

    // Ends what has not been appended.
    void give_up();

private:
    // Parts and the number of their next item, in order; removals too.
    struct Queue {
        std::deque<DevicePart> parts;
        std::size_t next = 0;
        std::uint64_t bytes = 0;  // of records that wait
    };

    void pump(Queue& queue);
    static void give_up(Queue& queue);
    bool write_item(const BatchPointer& batch, std::uint32_t number);
    bool write_removal(const BatchPointer& batch, std::uint32_t number);
    bool make_room(std::uint64_t length, bool is_move);
    bool end_without_room(const BatchPointer& batch, std::uint32_t item);

    const DeviceWriterSeat seat_;
    RecordCoder coder_;
    Queue moves_;  // first: room for the others comes by them
    Queue puts_;
};

}  // namespace kvo

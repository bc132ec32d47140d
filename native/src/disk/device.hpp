// One device of the disk tier: its roles, the order in which they are stepped, and what is done when its folder comes
// and goes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "disk/coding_choice.hpp"
#include "disk/device_condition.hpp"
#include "disk/device_evictor.hpp"
#include "disk/device_losses.hpp"
#include "disk/device_reader.hpp"
#include "disk/device_terms.hpp"
#include "disk/device_writer.hpp"
#include "disk/disk_batch.hpp"
#include "disk/io_runner.hpp"
#include "disk/open_segments.hpp"
#include "disk/segment_files.hpp"

namespace kvo {

// Only the device's thread may call `step` and all other members that are not marked for any thread. A step waits for
// files when it opens, recovers or probes the folder or creates a segment. Records do not wait for such a step: each
// batch has a deadline from its caller.
class Device {
public:
    // Code::invalid: the terms cannot be kept. Code::failed: there is no memory or no I/O engine. The first step opens
    // the folder.
    static Result<std::unique_ptr<Device>> create(DeviceTerms terms);
    ~Device();
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    // Any thread may call these.
    bool contains(const KeyMark& mark) { return index_.find(mark).has_value(); }
    bool can_read() const noexcept { return condition_.can_read(); }
    bool can_write() const noexcept { return condition_.can_write(); }
    DeviceHealth health() { return condition_.health(); }

    // Takes the part. Items that the device cannot serve now end at once.
    void add(DevicePart part);

    // Does what can be done now. Returns when to call again at the latest; call earlier if `file` becomes readable.
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

    void add_all(const BatchPointer& batch);
    void look_after(Instant now);
    void open();
    void drop_writes(DiskOutcome outcome);
    void become_read_only(const std::string& reason);
    void become_absent(const std::string& reason);
    void publish();

    const DeviceTerms terms_;
    IoRunner runner_;
    DeviceCondition condition_;
    DeviceCounts counts_;
    SegmentFiles files_;
    SharedIndex index_;
    CodingChoice coding_;
    DeviceLosses losses_;
    DeviceReader reader_;
    DeviceEvictor evictor_;
    OpenSegments open_segments_;
    DeviceWriter writer_;
};

}  // namespace kvo

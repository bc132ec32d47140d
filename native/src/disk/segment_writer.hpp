// A segment while it is written: records are packed into buffers, buffers go to the file, and both are told in order.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/io_runner.hpp"
#include "disk/record_format.hpp"
#include "disk/record_index.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

struct AppendedRecord {
    KeyMark mark;
    RecordPlace place;
    std::uint64_t end = 0;  // in the segment
    RecordFlag flag = RecordFlag::none;
    BatchPointer batch;
    std::uint32_t item = 0;
};

// The bytes of a record as they are written: empty if the record itself is. `key`: the number of the key that they are
// sealed with.
struct StoredForm {
    std::span<const std::uint8_t> bytes;
    std::optional<std::uint64_t> key;
};

// Where it writes, and who is told.
struct WriterSeat {
    std::uint32_t segment = 0;
    int file = -1;
    SegmentLife life;
    std::function<void(const AppendedRecord&)> written;
    std::function<void(const AppendedRecord&)> durable;
    std::function<void(std::uint64_t bytes)> spent;       // go to the device now
    std::function<void(const std::string& what)> failed;  // once
};

// For the device's thread. A record is told written when it and all before it in the segment are, and durable when an
// fdatasync that began afterwards has succeeded. So what is behind a hole was never promised.
class SegmentWriter {
public:
    SegmentWriter(WriterSeat seat, const DeviceTerms& terms, IoRunner& runner, BufferPool& buffers);

    // Whether a record of this length fits, with the footer behind it.
    bool has_room(std::uint64_t length) const;
    bool has_buffers(std::uint64_t length) const;

    // Copies the record in, for which it must have room and buffers and the item be claimed, in this form. False: the
    // record's bytes do not have their digest, and nothing has happened.
    bool append(const BatchPointer& batch, std::uint32_t item, const StoredForm& form = {});
    void append_removal(const BatchPointer& batch, std::uint32_t item);

    // Reports the item as durable once everything that is written now is durable.
    void await_durable(const BatchPointer& batch, std::uint32_t item);
    bool has_appended(const KeyMark& mark) const;  // and not written

    // Sends buffers that have waited long enough, and starts an fdatasync when one is due.
    void maintain(Instant now);
    Instant next_wake() const;

    // Writes the footer; no record may follow.
    void seal();
    bool is_done() const noexcept;  // sealed and durable; or failed, and nothing of it is under way

    bool has_failed() const noexcept { return has_failed_; }
    bool has_footer() const noexcept { return is_footer_written_; }
    std::uint64_t durable_end() const noexcept { return durable_end_; }
    std::uint64_t written_end() const noexcept { return written_end_; }
    std::uint32_t segment() const noexcept { return seat_.segment; }
    const std::vector<FooterEntry>& entries() const noexcept { return entries_; }

    // Ends all waiting items with `outcome`, and writes nothing more.
    void give_up(DiskOutcome outcome);

private:
    struct Buffer {
        std::byte* memory = nullptr;
        std::uint64_t offset = 0;  // in the segment
    };
    struct Range {
        std::uint64_t end = 0;
        bool is_written = false;
    };

    std::size_t buffers_missing(std::uint64_t length) const;
    void cover(std::uint64_t end);
    void uncover(std::uint64_t end);
    std::uint64_t copy_in(std::uint64_t at, const std::uint8_t* bytes, std::uint64_t length);
    std::uint64_t copy_with_name(std::uint64_t at, const DiskItem& item);
    void zero(std::uint64_t begin, std::uint64_t end);
    void commit(const RecordHeader& header, const BatchPointer& batch, std::uint32_t item);
    void send_full();
    void send(Buffer buffer, std::uint64_t bytes);
    void flush();
    void advance();
    void send_footer();
    void sync();
    bool is_sync_due(Instant now) const;
    void fail(const std::string& what, int error);

    const WriterSeat seat_;
    const DeviceTerms& terms_;
    IoRunner& runner_;
    BufferPool& pool_;

    std::deque<Buffer> buffers_;  // not sent, neighbours
    std::deque<Range> ranges_;    // sent, in order
    std::deque<AppendedRecord> appended_;
    std::deque<AppendedRecord> unsynced_;
    std::vector<FooterEntry> entries_;
    std::uint64_t position_ = kHeadBytes;  // where the next record begins
    std::uint64_t written_end_ = 0;
    std::uint64_t durable_end_ = 0;
    Instant first_waits_ = Instant::max();  // since when the oldest record in a buffer does
    Instant last_sync_;
    std::uint32_t under_way_ = 0;
    std::uint32_t wants_durable_ = 0;  // in `unsynced_`
    bool is_syncing_ = false;
    bool is_sealing_ = false;
    bool is_footer_sent_ = false;
    bool is_footer_written_ = false;
    bool is_footer_durable_ = false;
    bool has_failed_ = false;
};

}  // namespace kvo

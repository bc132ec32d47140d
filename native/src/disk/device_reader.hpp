// The reads of a device: batches become few large reads, whose bytes are checked while they are copied out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "disk/coding_choice.hpp"
#include "disk/device_terms.hpp"
#include "disk/disk_batch.hpp"
#include "disk/io_runner.hpp"
#include "disk/segment_files.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

// Plans the large reads that fetch a batch of records: a pure function of where the records lie.

struct WantedRange {
    std::uint32_t segment = 0;
    std::uint64_t begin = 0;  // of the header
    std::uint64_t end = 0;    // of the record
    std::uint32_t item = 0;   // the caller's
};

struct PlannedRead {
    std::uint32_t segment = 0;
    std::uint64_t begin = 0;  // both aligned for O_DIRECT
    std::uint64_t end = 0;
    std::size_t first = 0;  // the ranges that it touches, in the order of the plan
    std::size_t last = 0;   // behind them
};

struct ReadPlanTerms {
    std::uint64_t gap_bytes = 0;    // gaps up to this length are read too, rather than split a read
    std::uint64_t piece_bytes = 0;  // no read is longer; a multiple of kIoAlignment
};

// Sorts the ranges; each of their bytes is in exactly one read.
std::vector<PlannedRead> plan_reads(std::vector<WantedRange>& ranges, const ReadPlanTerms& terms);

// A record that is not what it was, or cannot be read although its segment is there.
struct LostRecord {
    RecordKey key;
    RecordPlace place;
    std::uint64_t generation = 0;  // of the segment
};

// Whether that errno is what devices and file systems say of bytes that they cannot give back.
bool is_of_the_medium(int error);

// The parts that the reader works on, all of which outlive it, and its callbacks.
struct ReaderSeat {
    const DeviceTerms& terms;
    IoRunner& runner;
    SegmentTable& segments;
    SharedIndex& index;
    DeviceCounts& counts;
    CodingChoice& coding;
    // Called after a read of the segment, with its errno, or 0 if it succeeded.
    std::function<void(std::uint32_t segment, int error)> told;
    std::function<void(const LostRecord& record, int error)> lost;  // 0: it was damaged
};

// For the device's thread.
class DeviceReader {
public:
    DeviceReader(ReaderSeat seat, AlignedMemory memory);

    // The folder was opened, and what was begun before has ended.
    void begin() { is_given_up_ = false; }

    // These items of a batch of gets.
    void add(const BatchPointer& batch, const std::vector<std::uint32_t>& items);

    // Begins reads while there are buffers for them.
    void pump();

    // Ends what has not begun; what is under way ends by itself.
    void give_up(DiskOutcome outcome);
    void abandon_memory() noexcept { pool_.abandon(); }

private:
    struct Wanted {
        std::uint32_t item = 0;
        RecordPlace place;
        SegmentLife life;
        KeyMark mark;
        std::array<std::byte, kRecordHeaderBytes> header{};
        RunDigest sum;
        std::vector<std::uint8_t> coded;  // what has come of a record that is coded
        // Of a sealed record that is not coded, whose payload goes to the record's memory: the rest of it.
        std::array<std::uint8_t, kSealOverheadBytes> seal{};
        std::uint64_t missing = 0;  // bytes that have not come
        bool has_ended = false;
    };
    struct Job {
        BatchPointer batch;
        std::vector<Wanted> wanted;  // in the order of the plan
        std::vector<PlannedRead> reads;
        std::size_t begun = 0;
    };
    using JobPointer = std::shared_ptr<Job>;

    void begin(const JobPointer& job, const PlannedRead& read);
    void tell_speed();
    void end_failed(Job& job, const PlannedRead& read, int error, bool is_own_timeout);
    void read_again(Job& job, const PlannedRead& read);
    void take_in(Job& job, const PlannedRead& read, const std::byte* bytes);
    void copy_part(Job& job, Wanted& wanted, const PlannedRead& read, const std::byte* bytes);
    bool copy_out(Job& job, Wanted& wanted, std::uint64_t at, std::span<const std::uint8_t> bytes);
    std::optional<std::uint64_t> digest_of(Job& job, Wanted& wanted, const RecordHeader& header);
    std::optional<std::uint64_t> open(Wanted& wanted, const RecordHeader& header, std::span<std::uint8_t> target);
    void finish_record(Job& job, Wanted& wanted);
    void lose(const Job& job, const Wanted& wanted, int error);
    void end(Job& job, Wanted& wanted, DiskOutcome outcome);

    const ReaderSeat seat_;
    BufferPool pool_;
    std::vector<std::uint8_t> opened_;                 // a coded record that was sealed
    Instant busy_since_;                               // while reads are under way
    std::uint64_t plain_bytes_ = 0, coded_bytes_ = 0;  // of records that have come since
    bool is_given_up_ = false;
    std::deque<JobPointer> jobs_;  // with reads that have not begun
    std::size_t under_way_ = 0;
};

}  // namespace kvo

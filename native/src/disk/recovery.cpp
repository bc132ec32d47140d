#include "disk/recovery.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "codec/record_codec.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kWindowBytes = std::uint64_t{4} << 20;
constexpr std::uint32_t kMostFailures = 16;  // reads of one segment; each may take the device seconds

// A part of the file in memory, moved along as it is looked at.
class Window {
public:
    Window(const ReadExactly& read, std::uint64_t segment_bytes, std::uint64_t record_limit_bytes)
        : read_(read), segment_bytes_(segment_bytes) {
        const std::uint64_t most = record_footprint(record_limit_bytes + kSealOverheadBytes) + 2 * kIoAlignment;
        bytes_ = std::min(segment_bytes, std::max(kWindowBytes, round_up(most, kIoAlignment)));
        if (Result<AlignedMemory> made = AlignedMemory::create(bytes_); made.ok()) {
            memory_ = std::move(made.value());
        }
    }
    // These bytes of the file; null: they cannot be had.
    const std::byte* see(std::uint64_t begin, std::uint64_t length) {
        const bool is_there = begin >= start_ && begin + length <= start_ + filled_;
        if (!is_there && !move_to(begin, length)) {
            return nullptr;
        }
        return memory_.start() + (begin - start_);
    }
    bool is_given_up() const noexcept { return memory_.bytes() == 0 || failures_ >= kMostFailures; }

private:
    bool move_to(std::uint64_t begin, std::uint64_t length) {
        start_ = begin / kIoAlignment * kIoAlignment;
        const std::uint64_t needed = round_up(begin + length, kIoAlignment) - start_;
        const std::uint64_t most = start_ < segment_bytes_ ? std::min(bytes_, segment_bytes_ - start_) : 0;
        // Where a window could not be read, no more is asked for than what is looked at.
        if (start_ >= careful_until_ && fill(needed, most)) {
            return true;
        }
        careful_until_ = std::max(careful_until_, start_ + most);
        return fill(needed, needed <= most ? needed : 0);
    }
    bool fill(std::uint64_t needed, std::uint64_t wanted) {
        filled_ = 0;
        if (is_given_up() || needed > wanted) {
            return false;
        }
        if (!read_(start_, memory_.span().first(wanted))) {
            ++failures_;
            return false;
        }
        filled_ = wanted;
        return true;
    }

    const ReadExactly& read_;
    const std::uint64_t segment_bytes_;
    std::uint64_t bytes_ = 0;
    AlignedMemory memory_;
    std::uint64_t start_ = 0;
    std::uint64_t filled_ = 0;
    std::uint64_t careful_until_ = 0;
    std::uint32_t failures_ = 0;
};

// The record at a place, if there is one, and where to look next.
struct Seen {
    std::optional<RecordHeader> record;
    std::uint64_t next = 0;
};

// Verifies records, in memory that one after the other takes.
struct Verifier {
    const SealKeys* keys;
    std::vector<std::uint8_t> record = {};
    std::vector<std::uint8_t> coded = {};

    // Whether the stored bytes are the record that the header describes.
    bool is_whole(const RecordHeader& header, std::span<const std::uint8_t> stored) {
        if (header.coded_length == 0) {
            return digest_record(stored, name_of(header.key)) == header.digest;
        }
        record.resize(header.length);
        if (is_sealed(header)) {
            const std::optional<SealedParts> parts = split_sealed(stored);
            const SealedName name = sealed_name(header.key, header.parent, header.length);
            return keys != nullptr && parts && keys->open(header.digest, name, *parts, record, coded);
        }
        return decode_record(stored, record) && digest_record(record, name_of(header.key)) == header.digest;
    }
};

Seen see_record(Window& window, std::uint64_t at, const SegmentLife& life, std::uint64_t segment_bytes,
                std::uint64_t record_limit_bytes, Verifier& verifier) {
    const std::byte* bytes = window.see(at, kRecordHeaderBytes);
    if (bytes == nullptr) {
        return {std::nullopt, round_up(at + 1, kIoAlignment)};
    }
    RecordHeader header;
    std::memcpy(&header, bytes, sizeof header);
    if (!is_record_header(header, life, segment_bytes - at)) {
        return {std::nullopt, at + kRecordAlignment};  // behind what was written together, or within what was damaged
    }
    const std::uint64_t stored = stored_length(header), end = at + record_footprint(stored);
    if (header.flag == RecordFlag::removal) {
        return {header, end};
    }
    bytes = window.see(at, kRecordHeaderBytes + stored);
    if (bytes == nullptr || (header.coded_length != 0 && header.length > record_limit_bytes)) {
        return {std::nullopt, end};
    }
    const auto* const record = reinterpret_cast<const std::uint8_t*>(bytes + kRecordHeaderBytes);
    return verifier.is_whole(header, {record, stored}) ? Seen{header, end} : Seen{std::nullopt, at + kRecordAlignment};
}

std::vector<FooterEntry> scan(const ReadExactly& read, const SegmentLife& life, std::uint64_t segment_bytes,
                              std::uint64_t record_limit_bytes, const SealKeys* keys) {
    Window window(read, segment_bytes, record_limit_bytes);
    std::vector<FooterEntry> entries;
    Verifier verifier{keys};
    for (std::uint64_t at = kHeadBytes; at + kRecordHeaderBytes <= segment_bytes && !window.is_given_up();) {
        const Seen seen = see_record(window, at, life, segment_bytes, record_limit_bytes, verifier);
        if (seen.record) {
            entries.push_back(make_entry(at, *seen.record));
        }
        at = seen.next;
    }
    return entries;
}

}  // namespace

std::optional<std::vector<FooterEntry>> find_footer(const ReadExactly& read, const SegmentLife& life,
                                                    std::uint64_t segment_bytes) {
    Result<AlignedMemory> block = AlignedMemory::create(sizeof(FooterTail));
    if (!block.ok() || !read(segment_bytes - sizeof(FooterTail), block.value().span())) {
        return std::nullopt;
    }
    FooterTail tail;
    std::memcpy(&tail, block.value().start(), sizeof tail);
    if (!is_footer_tail(tail, life, segment_bytes)) {
        return std::nullopt;
    }
    std::vector<FooterEntry> entries(tail.entry_count);
    const std::uint64_t bytes = footer_bytes(tail.entry_count) - sizeof tail;
    if (bytes == 0) {
        return are_entries({}, tail) ? std::optional(entries) : std::nullopt;
    }
    Result<AlignedMemory> memory = AlignedMemory::create(bytes);
    if (!memory.ok() || !read(tail.entries_offset, memory.value().span()) ||
        !are_entries(memory.value().span(), tail)) {
        return std::nullopt;
    }
    std::memcpy(entries.data(), memory.value().start(), entries.size() * sizeof(FooterEntry));
    return entries;
}

std::optional<FoundSegment> find_segment(const ReadExactly& read, std::uint64_t store, std::uint64_t segment_bytes,
                                         std::uint64_t record_limit_bytes, const SealKeys* keys) {
    Result<AlignedMemory> block = AlignedMemory::create(kHeadBytes);
    if (!block.ok() || !read(0, block.value().span())) {
        return std::nullopt;
    }
    SegmentHead head;
    std::memcpy(&head, block.value().start(), sizeof head);
    if (!is_segment_head(head, store, segment_bytes)) {
        return std::nullopt;
    }
    if (std::optional<std::vector<FooterEntry>> entries = find_footer(read, head.life, segment_bytes)) {
        return FoundSegment{head.life, true, true, std::move(*entries)};
    }
    return FoundSegment{head.life, false, true, scan(read, head.life, segment_bytes, record_limit_bytes, keys)};
}

std::optional<FoundSegment> SegmentIo::find(std::uint32_t number, int& error) {
    const int file = files_[number].file.number();
    const ReadExactly read_part = [&](std::uint64_t offset, std::span<std::byte> target) {
        const int now = error == ETIMEDOUT ? error : read(file, offset, target);
        error = now == ETIMEDOUT || error == 0 ? now : error;
        return now == 0;
    };
    auto found = find_segment(read_part, files_.store(), terms_.segment_bytes, terms_.record_limit_bytes,
                              terms_.seal_keys.get());
    if (found) {
        found->is_whole = error == 0;
    }
    return found;
}

std::optional<std::vector<FooterEntry>> SegmentIo::find_entries(std::uint32_t number) {
    const SegmentFile& segment = files_[number];
    const auto read_part = [this, file = segment.file.number()](std::uint64_t offset, std::span<std::byte> target) {
        return read(file, offset, target) == 0;
    };
    return find_footer(read_part, segment.life, terms_.segment_bytes);
}

bool SegmentIo::write_footer(std::uint32_t number, const FoundSegment& found) {
    const std::uint64_t bytes = footer_bytes(found.entries.size());
    Result<AlignedMemory> made = AlignedMemory::create(bytes);
    const FooterEntry& last = found.entries.back();
    if (!made.ok() || last.offset + record_footprint(stored_length(last)) > terms_.segment_bytes - bytes) {
        return false;
    }
    auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    std::memcpy(memory->start(), found.entries.data(), found.entries.size() * sizeof(FooterEntry));
    const FooterTail tail = make_footer_tail(found.life, found.entries.size(), terms_.segment_bytes,
                                             memory->span().first(bytes - sizeof(FooterTail)));
    std::memcpy(memory->start() + bytes - sizeof tail, &tail, sizeof tail);
    const int file = files_[number].file.number();
    files_.spend(bytes);
    return run(IoKind::write, file, terms_.segment_bytes - bytes, memory) == 0 &&
           run(IoKind::sync, file, 0, memory) == 0;
}

// An errno, 0 if all is there.
int SegmentIo::read(int file, std::uint64_t offset, std::span<std::byte> target) {
    Result<AlignedMemory> made = AlignedMemory::create(target.size());
    if (!made.ok()) {
        return ENOMEM;
    }
    const auto memory = std::make_shared<AlignedMemory>(std::move(made.value()));
    if (const int error = run(IoKind::read, file, offset, memory); error != 0) {
        return error;
    }
    counts_.read_bytes += target.size();
    std::memcpy(target.data(), memory->start(), target.size());
    return 0;
}

// An errno. The memory is the kernel's for as long as it may touch it.
int SegmentIo::run(IoKind kind, int file, std::uint64_t offset, const std::shared_ptr<AlignedMemory>& memory) {
    auto outcome = std::make_shared<std::optional<int>>();
    runner_.run(
        {kind, file, offset, memory->start(), static_cast<std::uint32_t>(memory->bytes()), 0},
        terms_.now() + terms_.io_timeout, [outcome](int error) { *outcome = error; }, [memory] {});
    for (runner_.poll(terms_.now()); !outcome->has_value(); runner_.poll(terms_.now())) {
        wait_readable(runner_.queue().file(), 10);
    }
    counts_.io_errors += **outcome == 0 ? 0 : 1;
    return **outcome;
}

namespace {

constexpr std::uint32_t kUnreadableLimit = 8;  // segments, until the device is taken for gone

}  // namespace

Status DeviceRecovery::run() {
    const Instant begun = terms_.now();
    const Result<std::vector<std::uint32_t>> numbers = files_.list();
    if (!numbers.ok()) {
        return numbers.fault();
    }
    std::vector<std::pair<std::uint32_t, FoundSegment>> found;
    std::vector<std::uint32_t> unreadable;
    std::uint32_t dropped = 0;
    for (const std::uint32_t number : numbers.value()) {
        if (const Status opened = files_.open_file(number); !opened.ok()) {
            if (opened.code() != Code::unavailable) {
                return opened;
            }
            ++dropped;
            if (const Status removed = files_.remove_file(number); !removed.ok()) {
                return removed;
            }
            continue;
        }
        int error = 0;
        auto one = io_.find(number, error);
        if (error != 0 && !one) {
            unreadable.push_back(number);
        }
        const bool has_gone = error == ETIMEDOUT || error == ENOMEM || unreadable.size() == kUnreadableLimit;
        if (has_gone || (!unreadable.empty() && unreadable.size() == numbers.value().size())) {
            return {Code::failed, "disk folder " + terms_.path +
                                      ": reads fail: " + system_fault(segment_file_name(number), error).message()};
        }
        if (one && !one->entries.empty()) {
            found.emplace_back(number, std::move(*one));
        } else {
            dropped += one ? 0 : 1;
        }
    }
    // Adopts the oldest segment first, so that a later record of the same key wins.
    std::ranges::sort(found, {}, [](const auto& one) { return one.second.life.generation; });
    for (auto& [number, segment] : found) {
        adopt(number, std::move(segment));
    }
    for (const std::uint32_t number : unreadable) {
        // Otherwise records that are removed meanwhile could be back once the file is readable again. Removing it may
        // fail now.
        static_cast<void>(files_.remove_file(number));
    }
    counts_.dropped_segments += dropped;
    counts_.recovery_us =
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(terms_.now() - begun).count());
    return {};
}

void DeviceRecovery::adopt(std::uint32_t number, FoundSegment found) {
    files_.go_on_with_life(number, found.life);
    SegmentFile& segment = files_[number];
    // One that could not be read everywhere gets none: there may be more in it.
    segment.has_footer = found.has_footer || (found.is_whole && io_.write_footer(number, found));
    ++counts_.recovered_segments;
    counts_.scanned_segments += found.has_footer ? 0 : 1;
    const std::lock_guard hold(index_.lock);
    for (const FooterEntry& entry : found.entries) {
        if (entry.flag == RecordFlag::removal) {
            ++segment.removals;
            index_.index.erase(mark_of(entry.key));
        } else {
            ++counts_.recovered_records;
            index_.index.put(mark_of(entry.key), place_of(number, entry));
        }
    }
}

}  // namespace kvo

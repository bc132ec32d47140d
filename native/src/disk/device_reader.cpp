#include "disk/device_reader.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <tuple>
#include <utility>

#include "codec/record_codec.hpp"
#include "disk/record_format.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t round_down(std::uint64_t bytes) { return bytes / kIoAlignment * kIoAlignment; }

// Whether what is sealed there is the record itself: coded ones are shorter.
bool is_sealed_plain(const RecordPlace& place) {
    return place.coded_length == std::uint64_t{place.length} + kSealOverheadBytes;
}

// Copies the part of `bytes`, which begin at `at`, that lies from `begin` on to `target`.
void copy_range(std::span<const std::uint8_t> bytes, std::uint64_t at, std::uint64_t begin,
                std::span<std::uint8_t> target) {
    const std::uint64_t from = std::max(at, begin), end = std::min(at + bytes.size(), begin + target.size());
    if (from < end) {
        std::memcpy(target.data() + (from - begin), bytes.data() + (from - at), end - from);
    }
}

// One stretch of a segment, in pieces.
void cut(const std::vector<WantedRange>& ranges, std::size_t first, std::size_t last, const ReadPlanTerms& terms,
         std::vector<PlannedRead>& reads) {
    std::uint64_t end = 0;
    for (std::size_t i = first; i < last; ++i) {
        end = std::max(end, round_up(ranges[i].end, kIoAlignment));
    }
    std::size_t touched = first;
    for (std::uint64_t begin = round_down(ranges[first].begin); begin < end;) {
        const std::uint64_t piece_end = std::min(end, begin + terms.piece_bytes);
        while (touched < last && ranges[touched].end <= begin) {
            ++touched;
        }
        std::size_t behind = touched;
        while (behind < last && ranges[behind].begin < piece_end) {
            ++behind;
        }
        reads.push_back({ranges[first].segment, begin, piece_end, touched, behind});
        begin = piece_end;
    }
}

}  // namespace

std::vector<PlannedRead> plan_reads(std::vector<WantedRange>& ranges, const ReadPlanTerms& terms) {
    std::ranges::sort(ranges, {}, [](const WantedRange& one) { return std::tuple(one.segment, one.begin, one.item); });
    std::vector<PlannedRead> reads;
    std::size_t first = 0;
    std::uint64_t reached = 0;
    for (std::size_t i = 0; i < ranges.size(); ++i) {
        const bool is_far = i > first && (ranges[i].segment != ranges[first].segment ||
                                          round_down(ranges[i].begin) > reached + terms.gap_bytes);
        if (is_far) {
            cut(ranges, first, i, terms, reads);
            first = i;
        }
        reached = i == first ? round_up(ranges[i].end, kIoAlignment)
                             : std::max(reached, round_up(ranges[i].end, kIoAlignment));
    }
    if (first < ranges.size()) {
        cut(ranges, first, ranges.size(), terms, reads);
    }
    return reads;
}

bool is_of_the_medium(int error) {
    return error == EIO || error == EREMOTEIO || error == EILSEQ || error == EBADMSG || error == EUCLEAN;
}

DeviceReader::DeviceReader(ReaderSeat seat, AlignedMemory memory)
    : seat_(std::move(seat)), pool_(std::move(memory), seat_.terms.read_piece_bytes) {}

void DeviceReader::add(const BatchPointer& batch, const std::vector<std::uint32_t>& items) {
    auto job = std::make_shared<Job>();
    job->batch = batch;
    std::vector<WantedRange> ranges;
    std::vector<Wanted> found;
    for (const std::uint32_t number : items) {
        const DiskItem& item = batch->item(number);
        const KeyMark mark = mark_of(item.key);
        const std::optional<RecordPlace> place = seat_.index.find(mark);
        if (!place || place->length != item.length) {
            batch->end(number, DiskOutcome::missing);
            continue;
        }
        Wanted wanted;
        wanted.item = number;
        wanted.place = *place;
        wanted.life = seat_.segments[place->segment].life;
        wanted.mark = mark;
        wanted.missing = kRecordHeaderBytes + stored_length(*place);
        ranges.push_back(
            {place->segment, place->offset, place->offset + wanted.missing, static_cast<std::uint32_t>(found.size())});
        found.push_back(wanted);
        ++seat_.segments[place->segment].readers;
    }
    if (found.empty()) {
        return;
    }
    job->reads = plan_reads(ranges, {seat_.terms.gap_bytes, seat_.terms.read_piece_bytes});
    for (const WantedRange& range : ranges) {
        job->wanted.push_back(found[range.item]);
    }
    jobs_.push_back(std::move(job));
}

void DeviceReader::pump() {
    while (!jobs_.empty() && pool_.free_count() > 0) {
        const JobPointer job = jobs_.front();
        const PlannedRead& read = job->reads[job->begun++];
        if (job->begun == job->reads.size()) {
            jobs_.pop_front();
        }
        const bool is_wanted = std::any_of(job->wanted.begin() + static_cast<std::ptrdiff_t>(read.first),
                                           job->wanted.begin() + static_cast<std::ptrdiff_t>(read.last),
                                           [&](const Wanted& one) { return !one.has_ended; });
        if (is_wanted) {
            begin(job, read);
        }
    }
}

void DeviceReader::begin(const JobPointer& job, const PlannedRead& read) {
    std::byte* const memory = pool_.take();
    const auto length = static_cast<std::uint32_t>(read.end - read.begin);
    // A read ends with its batch's deadline: afterwards no caller waits for it.
    const Instant longest = seat_.terms.now() + seat_.terms.io_timeout;
    const Instant deadline = std::min(job->batch->deadline, longest);
    const bool is_own_timeout = deadline == longest;
    if (under_way_++ == 0) {
        busy_since_ = seat_.terms.now();
    }
    seat_.runner.run(
        {IoKind::read, seat_.segments[read.segment].file.number(), read.begin, memory, length, 0}, deadline,
        [this, job, read, memory, length, is_own_timeout](int error) {
            if (error == 0) {
                seat_.counts.read_bytes += length;
                take_in(*job, read, memory);
                seat_.told(read.segment, 0);
            } else {
                end_failed(*job, read, error, is_own_timeout);
            }
            --under_way_;
            tell_speed();
        },
        [&pool = pool_, memory] { pool.give(memory); });
}

// Reports the read speed once no read is under way, or enough was read.
void DeviceReader::tell_speed() {
    if (under_way_ == 0 || plain_bytes_ + coded_bytes_ >= CodingChoice::kKnownBytes) {
        const Instant now = seat_.terms.now();
        seat_.coding.told_read(std::exchange(plain_bytes_, 0), std::exchange(coded_bytes_, 0), now - busy_since_);
        busy_since_ = now;
    }
}

void DeviceReader::end_failed(Job& job, const PlannedRead& read, int error, bool is_own_timeout) {
    if (error != ETIMEDOUT || is_own_timeout) {  // else the caller had no time
        seat_.told(read.segment, error);
    }
    if (!is_given_up_ && is_of_the_medium(error) && read.last - read.first > 1) {
        read_again(job, read);
        return;
    }
    for (std::size_t i = read.first; i < read.last; ++i) {
        Wanted& wanted = job.wanted[i];
        if (is_of_the_medium(error) && !wanted.has_ended) {
            lose(job, wanted, error);
        }
        end(job, wanted, error == ETIMEDOUT ? DiskOutcome::late : DiskOutcome::failed);
    }
}

// One record that cannot be read does not take its neighbours with it.
void DeviceReader::read_again(Job& job, const PlannedRead& read) {
    for (std::size_t i = read.first; i < read.last; ++i) {
        Wanted& old = job.wanted[i];
        if (old.has_ended) {
            continue;
        }
        old.has_ended = true;  // here: it is the new job's now
        auto again = std::make_shared<Job>();
        again->batch = job.batch;
        Wanted wanted;
        wanted.item = old.item;
        wanted.place = old.place;
        wanted.life = old.life;
        wanted.mark = old.mark;
        wanted.missing = kRecordHeaderBytes + stored_length(old.place);
        const WantedRange range{old.place.segment, old.place.offset, old.place.offset + wanted.missing, 0};
        again->wanted.push_back(wanted);
        std::vector<WantedRange> ranges{range};
        again->reads = plan_reads(ranges, {seat_.terms.gap_bytes, seat_.terms.read_piece_bytes});
        jobs_.push_back(std::move(again));
    }
}

void DeviceReader::take_in(Job& job, const PlannedRead& read, const std::byte* bytes) {
    for (std::size_t i = read.first; i < read.last; ++i) {
        Wanted& wanted = job.wanted[i];
        if (!wanted.has_ended) {
            copy_part(job, wanted, read, bytes);
        }
    }
}

// Copies the part of one record that lies in this read.
void DeviceReader::copy_part(Job& job, Wanted& wanted, const PlannedRead& read, const std::byte* bytes) {
    const std::uint64_t payload = wanted.place.offset + kRecordHeaderBytes;
    const std::uint64_t record_end = payload + stored_length(wanted.place);
    const std::uint64_t begin = std::max(wanted.place.offset, read.begin), stop = std::min(record_end, read.end);
    if (begin >= stop) {
        return;
    }
    const std::uint64_t header_end = std::min(stop, payload);
    if (begin < header_end) {
        std::memcpy(wanted.header.data() + (begin - wanted.place.offset), bytes + (begin - read.begin),
                    header_end - begin);
    }
    const std::uint64_t from = std::max(begin, payload);
    if (from < stop) {
        const auto* const source = reinterpret_cast<const std::uint8_t*>(bytes + (from - read.begin));
        if (!copy_out(job, wanted, from - payload, {source, stop - from})) {
            return;
        }
    }
    wanted.missing -= stop - begin;
    if (wanted.missing == 0) {
        finish_record(job, wanted);
    }
}

// To the record's memory, or, of one that is coded, to where it is decoded from. False: it has ended.
bool DeviceReader::copy_out(Job& job, Wanted& wanted, std::uint64_t at, std::span<const std::uint8_t> bytes) {
    if (wanted.place.coded_length != 0 && !is_sealed_plain(wanted.place)) {
        wanted.coded.resize(wanted.place.coded_length);
        std::ranges::copy(bytes, wanted.coded.begin() + static_cast<std::ptrdiff_t>(at));
        return true;
    }
    if (!job.batch->claim(wanted.item)) {
        end(job, wanted, DiskOutcome::late);
        return false;
    }
    auto* const record = reinterpret_cast<std::uint8_t*>(job.batch->item(wanted.item).address);
    if (is_sealed_plain(wanted.place)) {
        const std::span seal(wanted.seal);
        copy_range(bytes, at, 0, seal.first(kSealedHeadBytes));
        copy_range(bytes, at, kSealedHeadBytes, {record, wanted.place.length});
        copy_range(bytes, at, kSealedHeadBytes + wanted.place.length, seal.last(kSealTagBytes));
    } else {
        wanted.sum = combine(wanted.sum, copy_with_digest(record + at, bytes, at));
    }
    job.batch->release(wanted.item);
    return true;
}

// Opens or decodes to the record's memory, which is claimed. The digest that the bytes there have and should have;
// none: it is not whole, or not stored as records are now.
std::optional<std::uint64_t> DeviceReader::digest_of(Job& job, Wanted& wanted, const RecordHeader& header) {
    const DiskItem& item = job.batch->item(wanted.item);
    const std::span target(reinterpret_cast<std::uint8_t*>(item.address), wanted.place.length);
    if (is_sealed(header) != (seat_.terms.seal_keys != nullptr)) {
        return std::nullopt;
    }
    if (is_sealed(header)) {
        return open(wanted, header, target);
    }
    std::uint64_t digest = 0;
    if (header.coded_length == 0) {
        digest = finish(wanted.sum, name_of(item.key), header.length);
    } else {
        const Instant begun = seat_.terms.now();
        if (!decode_record(wanted.coded, target)) {
            return std::nullopt;
        }
        seat_.coding.told_decoded(target.size(), seat_.terms.now() - begun);
        digest = digest_record(target, name_of(header.key));
    }
    return digest == header.digest ? std::optional(digest) : std::nullopt;
}

std::optional<std::uint64_t> DeviceReader::open(Wanted& wanted, const RecordHeader& header,
                                                std::span<std::uint8_t> target) {
    const std::span<const std::uint8_t> seal(wanted.seal);
    const std::optional<SealedParts> parts =
        is_sealed_plain(wanted.place) ? SealedParts{seal.first<kSealedHeadBytes>(), target, seal.last<kSealTagBytes>()}
                                      : split_sealed(wanted.coded);
    if (!parts) {
        return std::nullopt;
    }
    const SealedName name = sealed_name(header.key, header.parent, header.length);
    return seat_.terms.seal_keys->open(header.digest, name, *parts, target, opened_);
}

void DeviceReader::finish_record(Job& job, Wanted& wanted) {
    RecordHeader header;
    std::memcpy(&header, wanted.header.data(), sizeof header);
    if (!job.batch->claim(wanted.item)) {
        end(job, wanted, DiskOutcome::late);
        return;
    }
    DiskItem& item = job.batch->item(wanted.item);
    const bool is_record = is_record_header(header, wanted.life, seat_.terms.segment_bytes - wanted.place.offset) &&
                           header.length == wanted.place.length && header.flag == RecordFlag::none &&
                           header.coded_length == wanted.place.coded_length;
    if (is_record && !(header.key == item.key)) {
        end(job, wanted, DiskOutcome::missing);  // another key with the same mark
        return;
    }
    const std::optional<std::uint64_t> digest = is_record ? digest_of(job, wanted, header) : std::nullopt;
    const bool is_coded = !wanted.coded.empty();
    wanted.coded = {};
    if (!digest) {
        lose(job, wanted, 0);
        end(job, wanted, DiskOutcome::damaged);
        return;
    }
    item.digest = *digest;
    item.parent = header.parent;
    (is_coded ? coded_bytes_ : plain_bytes_) += header.length;
    if (!job.batch->is_move) {
        ++seat_.counts.found_records;
        seat_.counts.found_bytes += header.length;
        const std::lock_guard hold(seat_.index.lock);
        seat_.index.index.touch(wanted.mark, wanted.place);
    }
    end(job, wanted, DiskOutcome::found);
}

void DeviceReader::lose(const Job& job, const Wanted& wanted, int error) {
    seat_.lost({job.batch->item(wanted.item).key, wanted.place, wanted.life.generation}, error);
}

void DeviceReader::end(Job& job, Wanted& wanted, DiskOutcome outcome) {
    if (!wanted.has_ended) {
        wanted.has_ended = true;
        --seat_.segments[wanted.place.segment].readers;
        job.batch->end(wanted.item, outcome);
    }
}

void DeviceReader::give_up(DiskOutcome outcome) {
    is_given_up_ = true;
    for (const JobPointer& job : std::exchange(jobs_, {})) {
        for (Wanted& wanted : job->wanted) {
            end(*job, wanted, outcome);
        }
    }
}

}  // namespace kvo

#include "copy/cuda_parts.hpp"

#include <algorithm>
#include <utility>

namespace kvo {
namespace {

// Where host memory stops being of one kind.
std::uint64_t end_of_kind(const RunList& runs, std::uint64_t begin, std::uint64_t end, const HostPieces& pieces,
                          bool& is_registered) {
    bool is_first = true;
    bool is_over = false;
    std::uint64_t kind_end = end;
    runs.visit_slots(begin, end, [&](const SlotRun& run) {
        for (std::uint64_t at = 0; at < run.length && !is_over;) {
            const HostSpan span = span_at(pieces, run.slot + at, run.length - at);
            if (is_first) {
                is_registered = span.is_registered;
                is_first = false;
            } else if (span.is_registered != is_registered) {
                is_over = true;
                kind_end = run.position + at;
            }
            at += span.length;
        }
    });
    return kind_end;
}

// Fills one list of a part. When it is full the part ends.
class EntryList {
public:
    EntryList(CopyPart& part, std::vector<PartEntry>& entries, std::size_t limit)
        : part_(part), entries_(entries), limit_(limit) {}

    void add(std::uint64_t position, const PartEntry& entry) {
        if (position >= part_.end) {
            return;
        }
        if (entries_.size() == limit_) {
            part_.end = position;
            return;
        }
        entries_.push_back(entry);
    }

private:
    CopyPart& part_;
    std::vector<PartEntry>& entries_;
    std::size_t limit_;
};

}  // namespace

bool starts_registered(const RunList& runs, std::uint64_t position, const HostPieces& pieces) {
    bool is_registered = false;
    runs.visit_slots(position, position + 1,
                     [&](const SlotRun& run) { is_registered = span_at(pieces, run.slot, run.length).is_registered; });
    return is_registered;
}

CopyPart cut_part(const RunList& runs, std::uint64_t begin, CopyWay way, const PartLimits& limits,
                  const HostPieces& pieces, const PartBuffers& buffers) {
    CopyPart part;
    part.begin = begin;
    // end_part may go beyond what it is asked for, a buffer may not.
    part.end = std::min(runs.end_part(begin, limits.bytes), begin + limits.bytes);
    bool is_registered = false;
    part.end = end_of_kind(runs, begin, part.end, pieces, is_registered);
    part.is_bounced = !is_registered;

    const bool by_kernel = way == CopyWay::mapped;
    const auto cut_host = [&](CudaAddress device, std::uint64_t slot, std::uint64_t position, std::uint64_t length,
                              EntryList& list) {
        if (part.is_bounced) {
            const CudaAddress bounce = by_kernel ? buffers.bounce_mapped : buffers.bounce;
            list.add(position, {device, bounce + (position - begin), length});
            return;
        }
        for (std::uint64_t at = 0; at < length;) {
            const HostSpan span = span_at(pieces, slot + at, length - at);
            list.add(position + at, {device + at, by_kernel ? span.mapped : slot + at, span.length});
            at += span.length;
        }
    };
    if (way == CopyWay::staged) {
        EntryList gathered(part, part.kernel, limits.entries);
        runs.visit_runs(begin, part.end, [&](const CopyRun& run) {
            gathered.add(run.position, {run.page, buffers.staging + (run.position - begin), run.length});
        });
        EntryList sent(part, part.transfers, SIZE_MAX);
        if (part.is_bounced) {
            sent.add(begin, {buffers.staging, buffers.bounce, part.end - begin});
        } else {
            runs.visit_slots(begin, part.end, [&](const SlotRun& run) {
                cut_host(buffers.staging + (run.position - begin), run.slot, run.position, run.length, sent);
            });
        }
        return part;
    }
    EntryList list(part, by_kernel ? part.kernel : part.transfers, limits.entries);
    runs.visit_runs(begin, part.end,
                    [&](const CopyRun& run) { cut_host(run.page, run.slot, run.position, run.length, list); });
    return part;
}

PartBuffers CudaPartRoom::buffers() const {
    PartBuffers buffers;
    buffers.staging = staging == nullptr ? 0 : staging->address;
    if (bounce != nullptr) {
        buffers.bounce = reinterpret_cast<CudaAddress>(bounce->host);
        buffers.bounce_mapped = bounce->mapped;
    }
    return buffers;
}

void CudaParts::open(std::vector<CudaPlace> places, std::vector<CudaBounce> bounces,
                     std::vector<CudaStaging> stagings) {
    places_ = std::move(places);
    bounces_ = std::move(bounces);
    stagings_ = std::move(stagings);
    lists_.size_bytes = settings_.list_bytes;
}

std::optional<CudaPartRoom> CudaParts::find_room(CopyWay way, bool is_bounced) {
    const auto bounce = std::ranges::find(bounces_, true, &CudaBounce::is_free);
    const std::optional<std::uint64_t> lists =
        way != CopyWay::batch ? lists_.find_room(settings_.kernel_entries * kListEntryBytes) : lists_.head;
    const bool is_queue_full =
        queued_transfers_ > 0 && queued_transfers_ + settings_.batch_entries > settings_.queued_transfers;
    if (count_ == places_.size() || is_queue_full || !lists || (is_bounced && bounce == bounces_.end())) {
        return std::nullopt;
    }
    return CudaPartRoom{is_bounced ? &*bounce : nullptr, way == CopyWay::staged ? &stagings_[next_staging_] : nullptr,
                        *lists};
}

CudaPlace& CudaParts::begin(CudaJob& job, const CopyPart& part, const CudaPartRoom& room,
                            std::shared_ptr<const HostPieces> pieces) {
    CudaPlace& place = places_[(first_ + count_) % places_.size()];
    place.job = &job;
    place.bounce = room.bounce;
    place.staging = room.staging;
    place.begin = part.begin;
    place.end = part.end;
    place.lists_begin = room.lists;
    place.lists_offset = lists_.offset_of(room.lists);
    lists_.head = room.lists + part.kernel.size() * kListEntryBytes;
    place.lists_end = lists_.head;
    place.transfers = part.transfers.size();
    place.pieces = std::move(pieces);
    queued_transfers_ += place.transfers;
    ++count_;
    ++job.part_count;
    if (place.bounce != nullptr) {
        place.bounce->is_free = false;
    }
    return place;
}

void CudaParts::keep_staging(const CudaPlace& place) {
    if (place.staging != nullptr) {
        place.staging->last = &place;
        next_staging_ = (next_staging_ + 1) % stagings_.size();
    }
}

void CudaParts::retire() {
    CudaPlace& place = places_[first_];
    --std::exchange(place.job, nullptr)->part_count;
    if (place.bounce != nullptr) {
        place.bounce->is_free = true;
    }
    place.pieces.reset();
    lists_.tail = place.lists_end;
    queued_transfers_ -= place.transfers;
    for (CudaStaging& staging : stagings_) {
        staging.last = staging.last == &place ? nullptr : staging.last;
    }
    first_ = (first_ + 1) % places_.size();
    --count_;
}

}  // namespace kvo

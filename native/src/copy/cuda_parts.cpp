#include "copy/cuda_parts.hpp"

#include <algorithm>
#include <utility>

namespace kvo {

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

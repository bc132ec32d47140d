// Names of entries that are gone, oldest forgotten first, for policies that learn from what comes back.
//
// A ring of names and sizes, and a hash table over its places that grows one bucket at a time (linear hashing), so no
// insertion rebuilds it: 20 bytes a ghost.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "evict/entry_lists.hpp"

namespace kvo {

class GhostList {
public:
    // Holds at most `limit` ghosts. A ghost that was taken keeps its place in the ring until it would have been the
    // oldest.
    explicit GhostList(EntryNumber limit) : limit_(limit) {}

    // Adds the newest; forgets the oldest if it is one too many.
    void add(std::uint64_t name, std::uint64_t size_bytes) {
        if (limit_ == 0) {
            return;
        }
        while (end_ - begin_ >= limit_) {
            drop_place();
        }
        const Place place = static_cast<Place>(end_++ % limit_);
        const std::uint32_t size = static_cast<std::uint32_t>(std::clamp<std::uint64_t>(size_bytes, 1, kSizeLimit));
        names_.grow_to(place) = name;
        sizes_.grow_to(place) = size;
        next_.grow_to(place) = 0;
        bytes_ += size;
        count_ += 1;
        if (count_ > bucket_count_) {
            split_bucket();
        }
        Place& first = buckets_.grow_to(bucket_of(name));
        next_[place] = first;
        first = place + 1;
    }

    // Forgets a name and returns its size; 0 if it is none of these.
    std::uint64_t take(std::uint64_t name) noexcept {
        if (count_ == 0) {
            return 0;
        }
        for (Place* link = &buckets_[bucket_of(name)]; *link != 0; link = &next_[*link - 1]) {
            if (names_[*link - 1] == name) {
                return unlink(*link);
            }
        }
        return 0;
    }

    void drop_oldest() noexcept {
        for (const EntryNumber before = count_; count_ == before && count_ > 0;) {
            drop_place();
        }
    }

    std::uint64_t bytes() const noexcept { return bytes_; }
    EntryNumber count() const noexcept { return count_; }

private:
    using Place = std::uint32_t;  // in links one higher: 0 is the end

    // Larger records count as this; a size of 0 marks a place whose ghost was taken.
    static constexpr std::uint64_t kSizeLimit = 0xffffffff;

    // Names are hashes already. Buckets at and above the highest power of two are those that were split off last.
    std::size_t bucket_of(std::uint64_t name) const noexcept {
        const std::size_t power = std::bit_ceil(bucket_count_);
        const std::size_t bucket = name & (power - 1);
        return bucket < bucket_count_ ? bucket : bucket - power / 2;
    }

    std::uint64_t unlink(Place& link) noexcept {
        const Place place = link - 1;
        const std::uint32_t size = sizes_[place];
        link = next_[place];
        sizes_[place] = 0;
        bytes_ -= size;
        count_ -= 1;
        return size;
    }

    void drop_place() noexcept {
        const Place place = static_cast<Place>(begin_++ % limit_);
        if (sizes_[place] == 0) {
            return;
        }
        Place* link = &buckets_[bucket_of(names_[place])];
        while (*link != place + 1) {
            link = &next_[*link - 1];
        }
        unlink(*link);
    }

    // One bucket more: it gets its share of the one that held its names until now.
    void split_bucket() {
        const std::size_t added = bucket_count_;
        buckets_.grow_to(added) = 0;
        const std::size_t halved = added - std::bit_floor(added);
        bucket_count_ += 1;
        for (Place* link = &buckets_[halved]; *link != 0;) {
            const Place place = *link - 1;
            if (bucket_of(names_[place]) == added) {
                *link = next_[place];
                next_[place] = buckets_[added];
                buckets_[added] = place + 1;
            } else {
                link = &next_[place];
            }
        }
    }

    EntryNumber limit_;
    std::uint64_t begin_ = 0;  // of the ring, counted without end
    std::uint64_t end_ = 0;
    EntryNumber count_ = 0;
    std::uint64_t bytes_ = 0;
    std::size_t bucket_count_ = 1;
    ChunkedArray<std::uint64_t> names_;
    ChunkedArray<std::uint32_t> sizes_;
    ChunkedArray<Place> next_;
    ChunkedArray<Place> buckets_;
};

}  // namespace kvo

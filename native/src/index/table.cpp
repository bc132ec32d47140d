#include "index/table.hpp"

#include <algorithm>
#include <bit>
#include <cassert>
#include <utility>

#include "base/memory_order.hpp"

namespace kvo {
namespace {

std::uint8_t tag_at(const Bucket& bucket, std::uint32_t position) {
    return static_cast<std::uint8_t>(position < 8 ? bucket.low_tags.load(kRelaxed) >> (8 * position)
                                                  : bucket.high_tags.load(kRelaxed) >> (8 * (position - 8)));
}

void set_tag(Bucket& bucket, std::uint32_t position, std::uint8_t tag) {
    if (position < 8) {
        const std::uint64_t mask = 0xffull << (8 * position);
        const std::uint64_t tags = bucket.low_tags.load(kRelaxed);
        bucket.low_tags.store((tags & ~mask) | (static_cast<std::uint64_t>(tag) << (8 * position)), kRelease);
    } else {
        const std::uint32_t shift = 8 * (position - 8);
        const std::uint32_t tags = bucket.high_tags.load(kRelaxed);
        bucket.high_tags.store((tags & ~(0xffu << shift)) | (static_cast<std::uint32_t>(tag) << shift), kRelease);
    }
}

void set_item(Bucket& bucket, std::uint32_t position, EntryNumber entry, std::uint8_t tag) {
    bucket.entries[position].store(entry, kRelease);
    set_tag(bucket, position, tag);
}

// One bit for each byte that is not 0.
std::uint32_t filled_bytes(std::uint64_t tags) {
    constexpr std::uint64_t kLowBits = 0x7f7f7f7f7f7f7f7f;
    const std::uint64_t high_bits = (((tags & kLowBits) + kLowBits) | tags) & ~kLowBits;
    return static_cast<std::uint32_t>((high_bits * 0x0002040810204081) >> 56);
}

// One bit for each position that holds an entry.
std::uint32_t filled_positions(const Bucket& bucket) {
    return filled_bytes(bucket.low_tags.load(kRelaxed)) | filled_bytes(bucket.high_tags.load(kRelaxed)) << 8;
}

}  // namespace

Table::Table(const IndexView& view, Reserve reserve) : view_(view), reserve_(std::move(reserve)) {}

Status Table::reset() {
    const std::uint64_t limit = view_.regions.buckets.item_limit;
    const auto count = static_cast<std::uint32_t>(std::min<std::uint64_t>(view_.header->bucket_count.load(), limit));
    if (Status status = reserve_(view_.regions.buckets, kFirstBuckets); !status.ok()) {
        return status;
    }
    // Readers now look only into the first buckets; the others are beyond the count.
    view_.header->bucket_count.store(kFirstBuckets, kRelease);
    for (std::uint32_t number = 0; number < std::max(count, kFirstBuckets); ++number) {
        announce_change(number);
        clear_bucket(number);
    }
    size_ = 0;
    overflow_used_ = 0;
    free_overflow_.clear();
    return {};
}

Status Table::insert(EntryNumber entry) {
    const std::uint64_t mixed = mix(entry);
    const std::uint32_t count = view_.header->bucket_count.load(kRelaxed);
    if (Status status = put(bucket_of(mixed, count), entry, tag_of(mixed), Chain::bounded); !status.ok()) {
        return status;
    }
    ++size_;
    // A little more than half full: the buckets not yet split hold twice as much as the others, and should not
    // overflow.
    if (size_ * 10 > static_cast<std::uint64_t>(count) * Bucket::kCapacity * 6 &&
        count < view_.regions.buckets.item_limit) {
        split_next();
    }
    return {};
}

std::vector<EntryNumber> Table::list_rivals(EntryNumber entry) const {
    const std::uint64_t mixed = mix(entry);
    std::vector<EntryNumber> all;
    std::vector<EntryNumber> alike;
    std::uint32_t number = bucket_of(mixed, view_.header->bucket_count.load(kRelaxed));
    for (; number != kNoBucket && alike.size() < alike_limit();
         number = view_.buckets[number].overflow.load(kRelaxed)) {
        const Bucket& bucket = view_.buckets[number];
        for (std::uint32_t rest = filled_positions(bucket); rest != 0; rest &= rest - 1) {
            const auto position = static_cast<std::uint32_t>(std::countr_zero(rest));
            all.push_back(bucket.entries[position].load(kRelaxed));
            if (tag_at(bucket, position) == tag_of(mixed)) {
                alike.push_back(all.back());
            }
        }
    }
    return alike.size() < alike_limit() ? all : alike;
}

std::uint64_t Table::average_chain() const noexcept { return size_ / view_.header->bucket_count.load(kRelaxed); }

void Table::prefetch(EntryNumber entry) const {
    __builtin_prefetch(&view_.buckets[bucket_of(mix(entry), view_.header->bucket_count.load(kRelaxed))], 1);
}

void Table::erase(EntryNumber entry) {
    const std::uint64_t mixed = mix(entry);
    const std::uint32_t first = bucket_of(mixed, view_.header->bucket_count.load(kRelaxed));
    Bucket& bucket = view_.buckets[first];
    if (bucket.overflow.load(kRelaxed) == kNoBucket) {
        // The usual case: the chain has one bucket, and no entry has to move into the hole.
        for (std::uint32_t alike = match_bucket(bucket, tag_of(mixed)); alike != 0; alike &= alike - 1) {
            const auto position = static_cast<std::uint32_t>(std::countr_zero(alike));
            if (bucket.entries[position].load(kRelaxed) == entry) {
                set_item(bucket, position, kNoEntry, 0);
                --size_;
                return;
            }
        }
    }
    list_chain(first);
    for (const std::uint32_t number : chain_) {
        const auto& entries = view_.buckets[number].entries;
        for (std::uint32_t position = 0; position < Bucket::kCapacity; ++position) {
            if (entries[position].load(kRelaxed) == entry) {
                take_out({number, position});
                --size_;
                return;
            }
        }
    }
    assert(!"the entry was in the table");
}

std::uint64_t Table::mix(EntryNumber number) const {
    const Entry& entry = view_.entries[number];
    Key key{{}, entry.space.load(kRelaxed)};
    for (std::size_t i = 0; i < key.hash.size(); ++i) {
        key.hash[i] = entry.hash[i].load(kRelaxed);
    }
    return mix_key(key, view_.header->seed);
}

// No reader can have missed what was not there before, so nothing is announced.
Status Table::put(std::uint32_t first, EntryNumber entry, std::uint8_t tag, Chain chain) {
    constexpr std::uint32_t kAllFilled = (1u << Bucket::kCapacity) - 1;
    std::uint32_t number = first;
    std::uint32_t alike = 0;
    for (std::uint32_t length = 1;; ++length) {
        Bucket& bucket = view_.buckets[number];
        if (const std::uint32_t filled = filled_positions(bucket); filled != kAllFilled) {
            set_item(bucket, static_cast<std::uint32_t>(std::countr_one(filled)), entry, tag);
            return {};
        }
        alike += static_cast<std::uint32_t>(std::popcount(match_bucket(bucket, tag)));
        if (chain == Chain::bounded &&
            (alike >= kAlikeLimit || length >= kChainLimit) &&  // first, because it is a comparison
            (alike >= alike_limit() || length >= chain_limit())) {
            return {Code::failed, "too many keys fall together"};
        }
        const std::uint32_t next = bucket.overflow.load(kRelaxed);
        if (next == kNoBucket) {
            break;
        }
        number = next;
    }
    const Result<std::uint32_t> fresh = take_overflow();
    if (!fresh.ok()) {
        return fresh.fault();
    }
    set_item(view_.buckets[fresh.value()], 0, entry, tag);
    view_.buckets[number].overflow.store(fresh.value(), kRelease);
    return {};
}

void Table::list_chain(std::uint32_t first) {
    chain_.clear();
    for (std::uint32_t number = first; number != kNoBucket; number = view_.buckets[number].overflow.load(kRelaxed)) {
        chain_.push_back(number);
    }
}

// Empties a place of the listed chain. Every bucket of a chain but the last is full: the hole is filled from there.
void Table::take_out(Place hole) {
    const std::uint32_t last = chain_.back();
    Bucket& tail = view_.buckets[last];
    if (hole.bucket != last) {
        const auto position = static_cast<std::uint32_t>(std::bit_width(filled_positions(tail)) - 1);
        set_item(view_.buckets[hole.bucket], hole.position, tail.entries[position].load(kRelaxed),
                 tag_at(tail, position));
        announce_change(chain_.front());  // before its old place is emptied
        hole = {last, position};
    }
    set_item(tail, hole.position, kNoEntry, 0);
    if (chain_.size() > 1 && filled_positions(tail) == 0) {
        chain_.pop_back();
        // A reader that stands in it has the others behind it, so it misses nothing when this one joins another chain.
        view_.buckets[chain_.back()].overflow.store(kNoBucket, kRelease);
        free_overflow_.push_back(last);
    }
}

// Increments the chain's version, since an entry has moved. A reader that missed its key and sees a new version
// searches again.
void Table::announce_change(std::uint32_t first) {
    std::atomic<std::uint32_t>& version = view_.buckets[first].version;
    version.store(version.load(kRelaxed) + 1, kRelease);
}

Result<std::uint32_t> Table::take_overflow() {
    std::uint32_t number;
    if (!free_overflow_.empty()) {
        number = free_overflow_.back();
        free_overflow_.pop_back();
    } else {
        const Region& region = view_.regions.overflow;
        if (overflow_used_ == region.item_limit) {
            return Status(Code::failed, "the index has no bucket left: too many keys fall together");
        }
        if (Status status = reserve_(region, overflow_used_ + 1); !status.ok()) {
            return status;
        }
        number = static_cast<std::uint32_t>(view_.regions.buckets.item_limit) + overflow_used_++;
    }
    clear_bucket(number);
    return number;
}

void Table::clear_bucket(std::uint32_t number) {
    Bucket& bucket = view_.buckets[number];
    bucket.low_tags.store(0, kRelease);
    bucket.high_tags.store(0, kRelease);
    bucket.overflow.store(kNoBucket, kRelease);
    for (auto& entry : bucket.entries) {
        entry.store(kNoEntry, kRelease);
    }
}

// At every moment a reader finds what stays in the old chain, and what leaves it in the old one or the new one.
void Table::split_next() {
    const std::uint32_t count = view_.header->bucket_count.load(kRelaxed);
    if (!reserve_(view_.regions.buckets, count + 1).ok()) {
        return;  // it goes on with fuller buckets
    }
    list_chain(count - std::bit_floor(count));
    list_leaving(count + 1);
    clear_bucket(count);
    announce_change(count);
    for (const Place& place : leaving_) {
        const Bucket& bucket = view_.buckets[place.bucket];
        const EntryNumber entry = bucket.entries[place.position].load(kRelaxed);
        if (!put(count, entry, tag_at(bucket, place.position), Chain::any).ok()) {
            free_chain(view_.buckets[count].overflow.load(kRelaxed));
            return;
        }
    }
    view_.header->bucket_count.store(count + 1, kRelease);
    // From the last one on, so that holes are filled with what stays.
    for (auto place = leaving_.rbegin(); place != leaving_.rend(); ++place) {
        take_out(*place);
    }
}

// Lists the entries of the listed chain that belong to bucket `count` - 1 once there are `count` buckets.
void Table::list_leaving(std::uint32_t count) {
    leaving_.clear();
    for (const std::uint32_t number : chain_) {
        const Bucket& bucket = view_.buckets[number];
        const std::uint32_t filled = filled_positions(bucket);
        for (std::uint32_t rest = filled; rest != 0; rest &= rest - 1) {
            const auto position = static_cast<std::size_t>(std::countr_zero(rest));
            __builtin_prefetch(&view_.entries[bucket.entries[position].load(kRelaxed)]);
        }
        for (std::uint32_t rest = filled; rest != 0; rest &= rest - 1) {
            const auto position = static_cast<std::uint32_t>(std::countr_zero(rest));
            if (bucket_of(mix(bucket.entries[position].load(kRelaxed)), count) == count - 1) {
                leaving_.push_back({number, position});
            }
        }
    }
}

void Table::free_chain(std::uint32_t first) {
    for (std::uint32_t number = first; number != kNoBucket; number = view_.buckets[number].overflow.load(kRelaxed)) {
        free_overflow_.push_back(number);
    }
}

}  // namespace kvo

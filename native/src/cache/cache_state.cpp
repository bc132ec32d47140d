#include "cache/cache_state.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/memory_order.hpp"

namespace kvo {
namespace {

std::size_t own_stripe() {
    static std::atomic<std::size_t> threads = 0;
    thread_local const std::size_t stripe = threads.fetch_add(1, std::memory_order_relaxed) % TouchBuffer::kStripes;
    return stripe;
}

}  // namespace

void TouchBuffer::take_stripe() {
    drained_entries_.clear();
    drained_ends_.clear();
    next_ = 0;
    Stripe& stripe = stripes_[stripe_++ % kStripes];
    const std::lock_guard lock(stripe.mutex);
    stripe.entries.swap(drained_entries_);
    stripe.ends.swap(drained_ends_);
}

bool TouchBuffer::add(std::span<const EntryNumber> entries) {
    Stripe& stripe = stripes_[own_stripe()];
    const std::lock_guard lock(stripe.mutex);
    if (stripe.entries.size() + entries.size() > kStripeLimit && !stripe.entries.empty()) {
        lost_.fetch_add(entries.size(), std::memory_order_relaxed);
        return false;
    }
    stripe.entries.insert(stripe.entries.end(), entries.begin(), entries.end());
    stripe.ends.push_back(stripe.entries.size());
    if (stripe.entries.size() > kStripeLimit / 4) {
        is_filling_.store(true, std::memory_order_relaxed);
    }
    return true;
}

WriterLock::~WriterLock() {
    for (Left* next = left_.load(); next != nullptr;) {
        const std::unique_ptr<Left> one(next);
        next = one->next;
    }
}

void WriterLock::leave(Call call) {
    push(std::move(call));
    // A thread that holds the lock looks for calls once more after giving it back.
    if (mutex_.try_lock()) {
        unlock();
    }
}

void WriterLock::push(Call call) {
    auto left = std::make_unique<Left>(Left{std::move(call), left_.load(std::memory_order_relaxed)});
    while (!left_.compare_exchange_weak(left->next, left.get(), std::memory_order_seq_cst)) {
    }
    static_cast<void>(left.release());
}

void WriterLock::take_left() {
    std::vector<std::unique_ptr<Left>> latest_first;
    for (Left* next = left_.exchange(nullptr, std::memory_order_acquire); next != nullptr;) {
        latest_first.emplace_back(next);
        next = latest_first.back()->next;
    }
    for (; !latest_first.empty(); latest_first.pop_back()) {
        taken_.push_back(std::move(latest_first.back()->call));
    }
}

void WriterLock::make_calls() {
    take_left();
    const std::size_t most = std::max(taken_.size(), kFew + 1) - kFew;
    for (std::size_t made = 0; made < most && !taken_.empty(); ++made) {
        const Call call = std::move(taken_.front());
        taken_.pop_front();
        call();
    }
    taken_count_.store(taken_.size(), std::memory_order_relaxed);
}

namespace {

std::function<Status(const Region&, std::uint64_t)> reserve_in(IndexFile& index) {
    return [&index](const Region& region, std::uint64_t count) { return index.ensure(region, count); };
}

}  // namespace

CacheState::CacheState(CacheMemory& memory, TenantTable tenants, Arena arena)
    : view(memory.index().view()),
      namespaces(view, reserve_in(memory.index())),
      sessions(
          view, reserve_in(memory.index()),
          [&index = memory.index()](std::uint16_t place) { return index.has_sign(place); },
          [this] { return store.count_room(); }),
      lease_lists(view, reserve_in(memory.index())),
      store(memory.index(), memory.segments(), namespaces, std::move(tenants), std::move(arena)) {}

void CacheState::drain_touches() {
    touches.drain([this](std::span<const EntryNumber> entries) { store.touch(entries); }, TouchBuffer::kAtOnce);
}

NamespaceUse CacheState::use_space(Space space) const {
    NamespaceUse name_space = namespaces.use(namespace_of(space));
    return name_space && group_of(space) < name_space->groups.size() ? std::move(name_space) : NamespaceUse();
}

std::uint64_t make_digest(const Namespace& name_space, Space space, std::span<const std::uint8_t, kHashBytes> hash,
                          std::uint32_t shard, std::span<const std::byte> record) {
    const RecordName name{name_space.fingerprint, hash, group_of(space), shard};
    return digest_record({reinterpret_cast<const std::uint8_t*>(record.data()), record.size()}, name);
}

std::uint64_t digest_of(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space) {
    const Space space = view.entries[entry].space.load(kRelaxed);
    const std::uint32_t shards = name_space.geometry.groups[group_of(space)].shards;
    if (shard >= shards) {
        return kNoDigest;
    }
    return shards == 1 ? view.digests[entry].digest.load(kRelaxed)
                       : view.shard_digests[entry].digest[shard].load(kRelaxed);
}

void set_digest(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space,
                std::uint64_t digest) {
    const Space space = view.entries[entry].space.load(kRelaxed);
    if (name_space.geometry.groups[group_of(space)].shards == 1) {
        view.digests[entry].digest.store(digest, std::memory_order_release);
    } else {
        view.shard_digests[entry].digest[shard].store(digest, std::memory_order_release);
    }
}

bool verify_entry(const CacheState& state, EntryNumber number) {
    const Entry& entry = state.view.entries[number];
    const Space space = entry.space.load(kRelaxed);
    const Namespace& name_space = *state.namespaces.find(namespace_of(space));
    const std::uint64_t record_bytes = name_space.geometry.groups[group_of(space)].record_bytes;
    const std::span<const std::byte> slot = state.store.slot_bytes(number);
    const auto hash = std::bit_cast<std::array<std::uint8_t, kHashBytes>>(hash_of(entry));
    for (std::uint32_t shard = 0; shard < name_space.geometry.groups[group_of(space)].shards; ++shard) {
        const auto record = slot.subspan(shard * record_bytes, record_bytes);
        if (make_digest(name_space, space, hash, shard, record) != digest_of(state.view, number, shard, name_space)) {
            return false;
        }
    }
    return true;
}

}  // namespace kvo

// The state that all parts of a cache work on: the tables in its index, and the lock for adding and removing entries.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "base/entry_number.hpp"
#include "cache/cache_memory.hpp"
#include "cache/entry_store.hpp"
#include "cache/lease_table.hpp"
#include "cache/namespace_table.hpp"
#include "cache/session_table.hpp"
#include "digest/digest.hpp"

namespace kvo {

// Acquired entries that the eviction policies have not been told of yet: an acquire must not wait for the writer.
//
// Safe to call from any thread. Threads write to stripes of their own, so they seldom meet.
class TouchBuffer {
public:
    static constexpr std::size_t kStripes = 8;
    static constexpr std::size_t kStripeLimit = 1u << 16;  // entries; what comes beyond is not remembered
    static constexpr std::size_t kAtOnce = 1u << 14;       // entries drained under one hold of a lock

    // False if the stripe is full and these touches are lost: it costs order, not bytes.
    bool add(std::span<const EntryNumber> entries);

    // Entries whose touches were lost.
    std::uint64_t lost() const noexcept { return lost_.load(std::memory_order_relaxed); }

    // Whether the buffer should be drained before long.
    bool is_filling() const noexcept { return is_filling_.load(std::memory_order_relaxed); }

    // Calls `touch(entries)` for each acquire, in the order of its thread, until at least `limit` entries were touched;
    // what is left comes the next time. Under the writer's lock.
    template <typename Touch>
    void drain(Touch touch, std::size_t limit = SIZE_MAX) {
        is_filling_.store(false, std::memory_order_relaxed);
        std::size_t touched = 0;
        for (std::size_t taken = 0; touched < limit;) {
            if (next_ == drained_ends_.size()) {
                if (taken++ == kStripes) {
                    return;
                }
                take_stripe();
                continue;
            }
            const std::size_t begin = next_ == 0 ? 0 : drained_ends_[next_ - 1];
            const std::size_t count = drained_ends_[next_++] - begin;
            touch(std::span<const EntryNumber>(drained_entries_).subspan(begin, count));
            touched += count;
        }
        is_filling_.store(true, std::memory_order_relaxed);
    }

private:
    struct alignas(64) Stripe {
        std::mutex mutex;
        std::vector<EntryNumber> entries;
        std::vector<std::size_t> ends;
    };

    std::array<Stripe, kStripes> stripes_;
    std::atomic<bool> is_filling_ = false;
    std::atomic<std::uint64_t> lost_ = 0;
    void take_stripe();

    std::vector<EntryNumber> drained_entries_;  // of the stripe before `stripe_`
    std::vector<std::size_t> drained_ends_;
    std::size_t next_ = 0;    // of `drained_ends_`
    std::size_t stripe_ = 0;  // whose turn it is
};

// The lock for adding and removing entries, and the calls that threads leave at it which must not wait for it.
//
// A thread that serves all domains leaves its calls here. They are made in their order, each under the lock: at once if
// the lock is free, else by the thread that holds it, before or after others get it. Each hold makes one call, or more
// if over kFew would be left waiting: at most kFew wait, and those that are left during one hold.
class WriterLock {
public:
    using Call = std::function<void()>;
    static constexpr std::size_t kFew = 64;

    WriterLock() = default;
    WriterLock(const WriterLock&) = delete;
    WriterLock& operator=(const WriterLock&) = delete;
    ~WriterLock();

    void lock() { mutex_.lock(); }
    bool try_lock() { return mutex_.try_lock(); }
    void unlock() {
        while (!release()) {
        }
    }

    // Never waits. A thread that holds the lock must not call it.
    void leave(Call call);
    // Leaves the next part of a call that is being made, behind all calls that were left before.
    void leave_rest(Call call) { push(std::move(call)); }

private:
    struct Left {
        Call call;
        Left* next = nullptr;
    };

    void push(Call call);
    void take_left();
    void make_calls();
    bool has_calls() const noexcept {
        return left_.load(std::memory_order_seq_cst) != nullptr || taken_count_.load(std::memory_order_relaxed) != 0;
    }
    // False: it has been taken again, for calls that wait.
    bool release() {
        if (has_calls()) {
            make_calls();
        }
        mutex_.unlock();
        return !has_calls() || !mutex_.try_lock();
    }

    std::mutex mutex_;
    std::atomic<Left*> left_ = nullptr;  // the latest first
    std::deque<Call> taken_;             // under the lock; the oldest first
    std::atomic<std::size_t> taken_count_ = 0;
};

// Owned by CacheCore. Any thread may use all of it but the store. A caller of the store holds the writer's lock, except
// for the store's counts and for functions whose comment says that a lease or a reservation is enough.
struct CacheState {
    static constexpr std::size_t kPart = 128;           // items done under one hold of the writer's lock
    static constexpr EntryNumber kScanPart = 1u << 12;  // entries looked at under one

    CacheState(CacheMemory& memory, TenantTable tenants, Arena arena);

    // Passes the acquired entries on to the policies. The caller holds the writer's lock.
    void drain_touches();
    // The namespace of a space, for as long as the use lives; none: there is no such group.
    NamespaceUse use_space(Space space) const;

    const IndexView& view;
    NamespaceTable namespaces;
    SessionTable sessions;
    LeaseTable lease_lists;
    TouchBuffer touches;
    mutable WriterLock writer;
    EntryStore store;
};

// The digests of entries' records: how they are made, where they stand, and whether the bytes are still those.

// Returns the digest of one shard's record of the block with this hash.
std::uint64_t make_digest(const Namespace& name_space, Space space, std::span<const std::uint8_t, kHashBytes> hash,
                          std::uint32_t shard, std::span<const std::byte> record);

// The digest in the index, or kNoDigest if the group has no such shard. The caller has a lease, a reservation or the
// writer's lock; the same holds for the functions below.
std::uint64_t digest_of(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space);
void set_digest(const IndexView& view, EntryNumber entry, std::uint32_t shard, const Namespace& name_space,
                std::uint64_t digest);

// Reads an entry's records and compares them with their digests.
bool verify_entry(const CacheState& state, EntryNumber entry);

}  // namespace kvo

// Each call of a cache, made together with the model: what the model says must come back is checked, and what the
// cache was free to choose (slots, victims) is checked against the rules and then believed.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "cache_model.hpp"
#include "check.hpp"
#include "digest/digest.hpp"
#include "shim/process_handle.hpp"

namespace kvo::test {

// Told where a call begins and ends, and when its result is in the model.
struct CallObserver {
    virtual ~CallObserver() = default;
    virtual void before(Call) {}
    virtual void after(Call) {}
    virtual void settled() {}
};

class CacheCalls {
public:
    CacheCalls(CacheCore& core, CacheModel& model, CallObserver& observer)
        : core_(core), model_(model), observer_(observer), spaces_(model.world.spaces()) {}

    CacheModel& model() { return model_; }
    CacheCore& core() { return core_; }

    // The tables of a new cache: the namespaces of the world.
    void open_world();

    std::vector<RecordNumber> reserve(std::size_t place, TenantNumber tenant, std::size_t space,
                                      const std::vector<KeyNumber>& keys, bool is_named);

    // Into the slots of a reservation, as an engine would.
    void write(RecordNumber number, std::uint32_t shard);

    // Records of one space that one session has reserved and written. `is_stale`: with tickets of another time.
    void commit(std::size_t place, std::size_t space, std::uint32_t shard, const std::vector<RecordNumber>& numbers,
                bool with_digests, bool is_stale);

    // Returns the outcome that a valid commit of one shard must have.
    CommitOutcome apply_commit(RecordNumber number, std::uint32_t shard, std::uint64_t digest);
    void abort(std::size_t place, const std::vector<RecordNumber>& numbers);
    void release(std::size_t lease);
    void invalidate(std::size_t space, const std::vector<KeyNumber>& keys);
    void clear(std::uint32_t name_space);
    void evict(std::uint64_t bytes);

    // False: the model has no place for another.
    bool open_session(std::uint64_t limit_bytes, Member member, pid_t process);
    // The engine of a quarantined session comes back.
    void reopen_session(std::size_t place, Member member, pid_t process);
    void quarantine_session(std::size_t place);
    void reclaim();
    void open_tenant(std::uint32_t number, std::uint64_t quota_bytes);
    void open_namespace(std::uint32_t number);
    void call_wrongly(std::size_t place);

    // A lease of what the model says, or what it says instead.
    void acquire(std::size_t place, const BoundaryQuery& query, std::uint32_t chain, std::uint32_t shard);
    void acquire_entries(std::size_t place, std::size_t space, const std::vector<KeyNumber>& keys, std::uint32_t shard);
    std::vector<KeyNumber> needed_keys(const BoundaryQuery& query, std::uint32_t chain, std::uint64_t boundary) const;
    std::uint64_t find_boundary(const BoundaryQuery& query, std::uint32_t chain) const;
    void damage(RecordNumber number);

    // Believes which of these keys were evicted, if they were allowed to be.
    void sync(const std::vector<KeyNumber>& keys);
    void sync_all();

    // All counters, and the bytes of all that is leased or reserved.
    void check_all();
    void check_bytes();

    std::span<std::byte> record_bytes(const ModelRecord& record, std::uint32_t shard);
    std::uint64_t digest_of(const ModelRecord& record, std::uint32_t shard);
    std::vector<std::uint8_t> hashes_of(const std::vector<KeyNumber>& keys) const;

private:
    template <typename Act>
    auto perform(Call call, Act act) {
        model_.pending.call = call;
        observer_.before(call);
        auto result = act();
        observer_.after(call);
        return result;
    }
    void settle() {
        model_.pending.call = Call::none;
        observer_.settled();
    }
    RecordNumber take_reservation(std::size_t place, TenantNumber tenant, KeyNumber key, Ticket ticket);
    void see(KeyNumber key, bool is_found);
    bool is_pinned(const ModelRecord& record) const {
        return record.state == ModelRecord::State::reserved || record.leases != 0;
    }
    // No two records that may not move lie in the same bytes.
    void check_apart(RecordNumber number);
    std::uint64_t used_bytes() const;
    bool is_over_quota(TenantNumber tenant, std::uint64_t more_bytes = 0) const;
    bool may_hold(TenantNumber tenant, std::uint64_t more_bytes) const;
    void check_nothing_to_evict(TenantNumber wanting = 0, std::uint64_t wanted_bytes = 0);
    bool may_carry_leased(const ModelRecord& record) const;
    // The block before, or for windows and states the prefix group's block that ends at the same token.
    void append_parent(std::vector<std::uint8_t>& parents, KeyNumber key) const;
    std::optional<std::size_t> free_lease() const;
    bool remove_damaged(const std::vector<KeyNumber>& keys);
    AcquireOutcome expect_lease(std::size_t place, const std::vector<KeyNumber>& keys);
    void take_lease(std::size_t place, const Acquired& acquired, const std::vector<KeyNumber>& keys,
                    std::uint32_t shard);
    void count_outcome(AcquireOutcome outcome) {
        hits_ += outcome == AcquireOutcome::hit;
        misses_ += outcome == AcquireOutcome::miss;
        refused_ += outcome == AcquireOutcome::over_limit;
    }

    CacheCore& core_;
    CacheModel& model_;
    CallObserver& observer_;
    const std::array<SpacePlan, kSpaces> spaces_;
    // Since this process has the cache.
    std::uint64_t hits_ = 0;
    std::uint64_t misses_ = 0;
    std::uint64_t refused_ = 0;
    std::uint64_t duplicates_ = 0;
};

}  // namespace kvo::test

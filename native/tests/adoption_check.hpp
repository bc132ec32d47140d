// Rules for a cache that was taken over from a process killed at any instruction: nothing that a call has answered is
// lost or wrong, and of the one call that was cut short either all, nothing, or whole parts happened.
#pragma once

#include <map>
#include <unordered_map>

#include "cache_calls.hpp"
#include "index/index_view.hpp"

namespace kvo::test {

class AdoptionCheck {
public:
    // `view`: of the adopted cache's index, read by others.
    AdoptionCheck(CacheCalls& calls, const IndexView& view);

    // Brings the model, which is as of the last call that returned, to what was adopted, and fails if there is no way.
    // Sessions that have a keeper live if it does.
    void settle_model(bool is_keeper_alive);

    // By the entries themselves: slots are apart, bytes are right, lease counts are what the lists say, every readable
    // entry can be found.
    void check_entries();

    // Acquires every readable entry and checks its bytes.
    void acquire_all();

    // Checks that, once no session holds anything, everything can be evicted and all of the memory allocated again.
    void drain();

private:
    struct Lease {
        SessionId session = 0;
        std::vector<EntryNumber> entries;
    };

    void settle_commit();
    void settle_abort();
    void settle_names();
    void settle_sessions(bool is_keeper_alive);
    void settle_leases();
    void settle_tables();
    void abort_unknown();
    bool may_lose(KeyNumber key) const;
    std::map<LeaseId, Lease> read_leases() const;
    EntryWord word(EntryNumber entry) const { return EntryWord(view_.entries[entry].word.load()); }
    KeyNumber key_of(EntryNumber entry) const;
    std::uint64_t address_of(EntryNumber entry) const;
    void fill(std::size_t space);

    CacheCalls& calls_;
    CacheModel& model_;
    CacheCore& core_;
    const IndexView& view_;
    const std::array<SpacePlan, kSpaces> spaces_;
    std::unordered_map<std::uint64_t, std::pair<std::uint32_t, std::uint32_t>> places_;  // chain and place, by hash
};

}  // namespace kvo::test

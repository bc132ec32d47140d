#include "cache/cache_state.hpp"

#include <array>

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// A state without a core.
struct BareState {
    BareState()
        : memory(value_of(CacheMemory::create(options()))),
          state(*memory,
                TenantTable::create(memory->index().view().tenants, find_policy("lru").value(),
                                    {.entry_limit = 100, .capacity_bytes = kSegmentBytes}),
                arena()) {
        CHECK(state.store.start().ok());
        space = make_space(value_of(state.namespaces.open(fingerprint(1), plain_geometry())), 0);
    }

    static CacheOptions options() {
        CacheOptions options = small_options();
        options.is_sparse = true;
        return options;
    }
    static Arena arena() {
        Arena arena = value_of(Arena::create({.segment_bytes = kSegmentBytes, .extent_bytes = kExtentBytes}));
        CHECK(arena.add_extents(kSegmentBytes / kExtentBytes).ok());
        return arena;
    }
    EntryNumber store_one(std::uint64_t key) {
        Effort effort;
        const ClassNumber size_class = value_of(state.store.open_class(space));
        const EntryNumber entry = state.store.reserve(space, size_class, 0, 0, effort);
        CHECK(state.store.publish(entry, read_hash(chain(key, 1).data()), kNoEntry, 0).ok());
        return entry;
    }
    bool is_readable(EntryNumber entry) const { return EntryWord(state.view.entries[entry].word.load()).is_readable(); }

    std::unique_ptr<CacheMemory> memory;
    CacheState state;
    Space space = 0;
};

}  // namespace

TEST(a_space_is_used_if_there_is_such_a_group) {
    const BareState bare;
    CHECK(bare.state.use_space(bare.space));
    CHECK(!bare.state.use_space(make_space(namespace_of(bare.space), 1)));
    CHECK(!bare.state.use_space(make_space(namespace_of(bare.space) + 1, 0)));
}

TEST(what_was_acquired_is_told_to_the_policies_when_it_is_drained) {
    BareState bare;
    const EntryNumber first = bare.store_one(1);
    const EntryNumber second = bare.store_one(2);
    CHECK(bare.state.touches.add(std::array{first}));
    bare.state.drain_touches();
    CHECK(bare.state.store.evict_one());
    CHECK(bare.is_readable(first) && !bare.is_readable(second));
}

// Files whose bytes are not what any process wrote: whatever is believed of them, no slot may have two owners.
#include <map>
#include <random>

#include "cache_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// A cache of few entries in all states, under two sessions, in three namespaces and two tenants.
struct Victim {
    explicit Victim(std::mt19937_64& random) : cache(options()) {
        const std::vector<Geometry> geometries = {plain_geometry(), plain_geometry(3000, 2), hybrid_geometry()};
        for (std::uint8_t i = 0; i < 3; ++i) {
            spaces.push_back(cache.open(geometries[i], i));
        }
        const TenantNumber tenant = value_of(cache->open_tenant("tenant", 1 << 20));
        for (int i = 0; i < 2; ++i) {
            sessions.push_back(cache.session());
            auto self = ProcessHandle::open(value_of(identify_process(getpid())));
            CHECK(cache->sessions().add_member(sessions.back(), value_of(std::move(self))).ok());
        }
        for (std::uint64_t i = 0; i < 12; ++i) {
            const Space space = spaces[random() % 3];
            const SessionId session = sessions[i % 2];
            CHECK_EQUAL(cache.put(session, space, chain(i, 8), i % 3 ? tenant : TenantNumber{0}), 8u);
            if (i % 2) {
                CHECK(cache.take(session, space, chain(i, 8, 0)).has_value());
            }
            if (i % 4 == 3) {
                CHECK_EQUAL(cache->removals().invalidate(space, chain(i, 2)), 2u);
            }
            CHECK_EQUAL(cache.reserve(session, space, chain(100 + i, 2)).size(), 2u);
        }
    }
    static CacheOptions options() {
        CacheOptions options = small_options(1);
        options.entry_limit = 300;
        return options;
    }

    SmallCache cache;
    std::vector<Space> spaces;
    std::vector<SessionId> sessions;
};

// Changes some bytes of one kind of record.
void damage(const IndexView& view, std::mt19937_64& random) {
    struct Part {
        void* begin;
        std::size_t bytes;
    };
    const std::uint32_t entries = view.header->entry_count;
    const std::vector<Part> parts = {
        {view.entries, entries * sizeof(Entry)},
        {view.digests, entries * sizeof(EntryDigest)},
        {view.lease_nodes, view.header->lease_node_count * sizeof(LeaseNode)},
        {view.sessions, 2 * 40},
        {view.namespaces, 3 * sizeof(NamespaceRecord) / 8},
        {view.tenants, 3 * sizeof(TenantRecord)},
        {&view.header->entry_count, 6 * sizeof(std::uint32_t)},
        {view.buckets, view.header->bucket_count * sizeof(Bucket)},
    };
    for (int i = 0; i < 3; ++i) {
        const Part& part = parts[random() % parts.size()];
        for (std::uint64_t changes = 1 + random() % 40; changes > 0; --changes) {
            std::byte* const at = static_cast<std::byte*>(part.begin) + random() % part.bytes;
            // Small numbers are the more believable ones.
            *at = static_cast<std::byte>(random() % 3 == 0 ? random() : random() % 4);
        }
    }
}

// Slots of all entries that are not free; none shares a byte with another. How many bytes they have.
std::uint64_t check_apart(SmallCache& cache, const std::vector<std::uint64_t>& slot_bytes_by_space,
                          const std::map<Space, std::size_t>& places) {
    const IndexFile index = cache.open_index();
    const IndexView& view = index.view();
    std::map<std::uint64_t, std::uint64_t> ends;
    std::uint64_t bytes = 0;
    for (EntryNumber entry = 0; entry < view.header->entry_count; ++entry) {
        if (EntryWord(view.entries[entry].word).state() == EntryState::free) {
            continue;
        }
        const auto place = places.find(view.entries[entry].space);
        if (place == places.end()) {
            return 0;  // in a group of a namespace whose record was changed into another sound one
        }
        const std::uint64_t own = slot_bytes_by_space[place->second];
        const Slot slot = unpack_slot(view.entries[entry].slot);
        const std::uint64_t begin = slot.span * kExtentBytes + slot.index * slot_bytes_for(own);
        CHECK(begin + own <= kSegmentBytes);
        const auto after = ends.lower_bound(begin);
        CHECK(after == ends.end() || after->first >= begin + own);
        CHECK(after == ends.begin() || std::prev(after)->second <= begin);
        ends[begin] = begin + own;
        bytes += own;
    }
    return bytes;
}

}  // namespace

TEST(damaged_files_crash_nobody_and_share_no_slot) {
    std::mt19937_64 random(23);
    std::size_t compared = 0;
    for (int round = 0; round < 300; ++round) {
        Victim victim(random);
        SmallCache& cache = victim.cache;
        if (Status status = cache.try_restart([&](const IndexView& view) { damage(view, random); }); !status.ok()) {
            CHECK(status.code() == Code::invalid && status.message().find('\n') == std::string::npos);
            continue;
        }

        // The geometries as they are believed now.
        std::vector<std::uint64_t> slot_bytes;
        std::map<Space, std::size_t> places;
        for (std::uint8_t i = 0; i < 3; ++i) {
            const std::vector<Geometry> geometries = {plain_geometry(), plain_geometry(3000, 2), hybrid_geometry()};
            const auto number = cache->namespaces().open(fingerprint(i), geometries[i]);
            for (std::uint32_t group = 0; number.ok() && group < geometries[i].groups.size(); ++group) {
                places[make_space(number.value(), group)] = slot_bytes.size();
                slot_bytes.push_back(geometries[i].groups[group].slot_bytes());
            }
        }
        const bool is_known = places.size() == 7;
        if (is_known && check_apart(cache, slot_bytes, places) == cache->stats().used_bytes) {
            ++compared;
        }

        // Everything is used: nothing may be handed out twice, and no use may end badly.
        const Space space = make_space(value_of(cache->namespaces().open(fingerprint(99), plain_geometry())), 0);
        cache.open(plain_geometry(), 99);
        const SessionId session = cache.session();
        for (const SessionId of : victim.sessions) {
            cache->sessions().reopen(of);
        }
        for (std::uint64_t prompt = 0; prompt < 12; ++prompt) {
            for (const Space old : victim.spaces) {
                const auto acquired = cache->leases().acquire_entries(session, old, chain(prompt, 8));
                if (acquired.ok() && acquired.value().outcome == AcquireOutcome::hit) {
                    CHECK(cache->leases().release(session, acquired.value().lease));
                }
            }
        }
        for (std::uint64_t prompt = 200; prompt < 206; ++prompt) {
            const Hashes hashes = chain(prompt, 200);
            const std::size_t readable = cache.put(session, space, hashes);
            for (std::size_t i = 0; i < readable; ++i) {
                if (const auto lease = cache.take(session, space, chain(prompt, 1, i))) {
                    CHECK(cache->leases().release(session, lease->lease));
                }
            }
        }
        if (places.size() == 7) {
            places[space] = slot_bytes.size();
            slot_bytes.push_back(4096);
            check_apart(cache, slot_bytes, places);
        }
        for (const SessionId of : victim.sessions) {
            cache->sessions().quarantine(of);
        }
        cache->reclaim_ended();
        cache->removals().clear(namespace_of(space));
        const CacheStats stats = cache->stats();
        CHECK(stats.used_bytes <= kSegmentBytes);
        CHECK(stats.readable <= 300 && stats.reserved <= 300 && stats.quarantined <= 300);
        cache.restart();
    }
    CHECK(compared > 50);
}

TEST(files_of_nothing_but_noise_are_refused) {
    std::mt19937_64 random(29);
    for (int round = 0; round < 50; ++round) {
        SmallCache cache;
        CacheFiles files = cache.duplicate_files();
        cache.owner().reset();
        {
            const IndexFile index = value_of(IndexFile::adopt(duplicate(files.index.number())));
            auto* const bytes = reinterpret_cast<std::byte*>(index.view().header);
            // One of the header's fields that never change after the file was made. The seed is left out: it may be any
            // number.
            const std::size_t at = std::vector<std::size_t>{0, 8, 12, 32, 40, 48}[static_cast<std::size_t>(round) % 6];
            bytes[at] ^= static_cast<std::byte>(1 + random() % 255);
        }
        const auto adopted = CacheCore::adopt(std::move(files), small_options());
        CHECK(!adopted.ok());
        CHECK(!adopted.fault().message().empty() && adopted.fault().message().find('\n') == std::string::npos);
    }
}

// The files of a cache whose process has ended, with anything in them: looked at by a reader, adopted, and used.
#include <array>
#include <cstring>

#include "cache/index_reader.hpp"
#include "cache_fixture.hpp"
#include "target.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::uint64_t kBytes = 1 << 20;
constexpr std::array<std::uint32_t, 2> kShards = {0, 1};

CacheOptions tiny_options() {
    CacheOptions options = small_options();
    options.pool_bytes = options.segment_bytes = kBytes;
    options.entry_limit = 300;
    return options;
}

// In all states that an entry has, of two namespaces and two tenants.
struct Victim {
    Victim() : cache(tiny_options()) {
        spaces = {cache.open(plain_geometry(1000, 2), 0), cache.open(hybrid_geometry(), 1)};
        const TenantNumber tenant = value_of(cache->open_tenant("tenant", 1 << 18));
        session = cache.session();
        for (std::uint64_t prompt = 0; prompt < 4; ++prompt) {
            const Space space = spaces[prompt % 2];
            CHECK_EQUAL(cache.put(session, space, chain(prompt, 4), prompt < 2 ? tenant : TenantNumber{0}), 4u);
        }
        CHECK(cache.take(session, spaces[0], chain(0, 4)).has_value());
        CHECK_EQUAL(cache->removals().invalidate(spaces[0], chain(0, 1)), 1u);
        CHECK_EQUAL(cache.reserve(session, spaces[1], chain(100, 2)).size(), 2u);
    }
    SmallCache cache;
    std::vector<Space> spaces;
    SessionId session = 0;
};

// Where a change goes: to a kind of item, one of its first ones, some byte of it.
struct Change {
    std::uint8_t part = 0;
    std::uint8_t item = 0;
    std::uint16_t byte = 0;
    std::uint8_t size = 0;
    std::uint64_t number = 0;
};

Change read_change(fuzz::Input& input) {
    Change change;
    change.part = input.byte();
    change.item = input.byte();
    change.byte = input.number<std::uint16_t>();
    change.size = input.byte();
    change.number = input.number<std::uint64_t>();
    return change;
}

fuzz::Output& write_change(fuzz::Output& output, const Change& change) {
    return output.number(change.part).number(change.item).number(change.byte).number(change.size).number(change.number);
}

void apply(const Change& change, const IndexView& view) {
    struct Part {
        void* begin;
        std::uint64_t item_bytes;
    };
    const std::vector<Part> parts = {
        {view.header, sizeof(*view.header)},
        {view.entries, sizeof(Entry)},
        {view.digests, sizeof(EntryDigest)},
        {view.lease_nodes, sizeof(LeaseNode)},
        {view.sessions, view.regions.sessions.item_bytes},
        {view.namespaces, sizeof(NamespaceRecord)},
        {view.tenants, sizeof(TenantRecord)},
        {view.buckets, sizeof(Bucket)},
    };
    const std::size_t which = change.part % parts.size();
    const std::uint64_t item = which == 0 ? 0 : change.item % (which == 6 ? 4 : 32);
    const std::size_t size = std::size_t{1} << change.size % 4;
    const std::uint64_t within = change.byte % (parts[which].item_bytes - size + 1);
    std::memcpy(static_cast<std::byte*>(parts[which].begin) + item * parts[which].item_bytes + within, &change.number,
                size);
}

void look(int file, const Victim& victim) {
    auto reader = IndexReader::open(duplicate(file));
    if (!reader.ok()) {
        return;
    }
    const Hashes hashes = chain(1, 8);
    std::vector<std::uint8_t> found(8);
    for (const Space space : victim.spaces) {
        static_cast<void>(reader.value()->lookup(space, hashes, found));
        static_cast<void>(reader.value()->find_boundary(
            {.name_space = namespace_of(space), .chain = hashes, .local = 0, .limit = 1000, .alignment = 1}));
    }
}

void use(SmallCache& cache, const Victim& victim) {
    const SessionId session = cache.session();
    for (std::uint64_t prompt = 0; prompt < 4; ++prompt) {
        for (const Space space : victim.spaces) {
            const auto acquired = cache->leases().acquire_entries(session, space, chain(prompt, 4), kShards);
            if (acquired.ok() && acquired.value().outcome == AcquireOutcome::hit) {
                CHECK(cache->leases().release(session, acquired.value().lease));
            }
            const Hashes hashes = chain(prompt, 8);
            static_cast<void>(cache->leases().acquire(
                session,
                {.name_space = namespace_of(space), .chain = hashes, .local = 0, .limit = 1000, .alignment = 1},
                kShards));
        }
    }
    const auto fresh = cache->namespaces().open(fingerprint(99), plain_geometry(5000));
    if (fresh.ok()) {
        const Space space = cache.open(plain_geometry(5000), 99);
        const Hashes hashes = chain(200, 60);
        const std::size_t readable = cache.put(session, space, hashes);
        for (std::size_t i = 0; i < readable; ++i) {
            if (const auto lease = cache.take(session, space, chain(200, 1, i))) {
                CHECK(cache->leases().release(session, lease->lease));
            }
        }
    }
    cache->sessions().reopen(victim.session);
    cache->sessions().quarantine(victim.session);
    cache->reclaim_ended();
    const CacheStats stats = cache->stats();
    CHECK(stats.used_bytes <= kBytes);
    CHECK(stats.readable <= 300 && stats.reserved <= 300 && stats.quarantined <= 300);
}

}  // namespace

std::vector<fuzz::Bytes> fuzz::make_seeds() {
    std::vector<Bytes> seeds = {{}};
    // Every part, with what counts and what points too far.
    for (std::uint8_t part = 0; part < 8; ++part) {
        for (const std::uint64_t number : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{0x7fffffff}, UINT64_MAX}) {
            Output output;
            for (std::uint16_t at = 0; at < 4; ++at) {
                write_change(output,
                             {part, static_cast<std::uint8_t>(at), static_cast<std::uint16_t>(at * 8), 2, number});
            }
            seeds.push_back(output.bytes());
        }
    }
    return seeds;
}

void fuzz::run(std::span<const std::uint8_t> bytes) {
    Input input(bytes);
    Victim victim;
    SmallCache& cache = victim.cache;
    FileDescriptor index = duplicate(cache->memory().files().index);
    const Status status = cache.try_restart([&](const IndexView& view) {
        for (int changes = 0; changes < 64 && !input.is_empty(); ++changes) {
            apply(read_change(input), view);
        }
        look(index.number(), victim);
    });
    if (status.ok()) {
        use(cache, victim);
    } else {
        CHECK(!status.message().empty() && status.message().find('\n') == std::string::npos);
    }
}

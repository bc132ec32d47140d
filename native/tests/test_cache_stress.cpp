// Eight threads at once on one cache, with every operation there is. Whatever the order: a record that was acquired has
// exactly the bytes that its key asks for.
#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <random>
#include <thread>

#include "cache_fixture.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kThreads = 8;
constexpr std::uint64_t kPrompts = 300;
constexpr std::uint64_t kBlocks = 12;

// State that all threads share: two namespaces of different record sizes, some groups sharded.
struct Stage {
    Stage(const std::string& policy, Verify verify, Growth growth) : cache(options(policy, verify), growth) {
        spaces = {cache.open(plain_geometry(2000), 1), cache.open(hybrid_geometry(), 2)};
        for (std::uint32_t group = 1; group < 4; ++group) {
            spaces.push_back(spaces[1] + group);
        }
        tenants = {0, value_of(cache->open_tenant("bounded", 1 << 20)), value_of(cache->open_tenant("guest", 0))};
    }
    static CacheOptions options(const std::string& policy, Verify verify) {
        CacheOptions options = small_options(2, policy);
        options.verify = verify;
        options.entry_limit = 1500;
        options.step_bytes = 4 * kExtentBytes;
        return options;
    }

    SmallCache cache;
    std::vector<Space> spaces;
    std::vector<TenantNumber> tenants;
    std::atomic<std::uint64_t> served = 0;
    bool shrinks = false;
};

class Actor {
public:
    Actor(Stage& stage, std::uint64_t seed) : stage_(stage), random_(seed), session_(open()) {}

    void act() {
        const std::uint64_t which = random_() % 100;
        if (which < 35) {
            use();
        } else if (which < 50) {
            use_prefix();
        } else if (which < 80) {
            save();
        } else if (which < 86) {
            maintain(which);
        } else if (which < 90) {
            const Hashes hashes = chain(random_() % kPrompts, 1 + random_() % 3);
            stage_.cache->removals().invalidate(stage_.spaces[random_() % stage_.spaces.size()], hashes);
        } else if (which < 97) {
            stage_.cache.count_readable(stage_.spaces[random_() % stage_.spaces.size()],
                                        chain(random_() % kPrompts, kBlocks));
        } else {
            renew_session();
        }
    }

    // Gives back everything that the thread holds, and ends its session.
    void finish() {
        for (const LeaseId lease : leases_) {
            CHECK(stage_.cache->leases().release(session_, lease));
        }
        stage_.cache->sessions().quarantine(session_);
    }

private:
    SessionId open() { return stage_.cache.session(400000); }

    void use() {
        const Space space = stage_.spaces[random_() % stage_.spaces.size()];
        const Hashes hashes = chain(random_() % kPrompts, 1 + random_() % kBlocks);
        const auto lease = stage_.cache.take(session_, space, hashes);  // compares every byte
        if (!lease) {
            return;
        }
        stage_.served.fetch_add(hashes.size() / kHashBytes);
        if (random_() % 4 == 0 && leases_.size() < 4) {
            leases_.push_back(lease->lease);
            return;
        }
        CHECK(stage_.cache.is_right(*lease, space, hashes));
        CHECK(stage_.cache->leases().release(session_, lease->lease));
        CHECK(!stage_.cache->leases().release(session_, lease->lease));
    }

    void use_prefix() {
        const std::uint64_t prompt = random_() % kPrompts;
        const Hashes request = chain(prompt, kBlocks);
        const Acquired acquired = value_of(stage_.cache->leases().acquire(
            session_, {.name_space = namespace_of(stage_.spaces[0]), .chain = request, .limit = ~0ull}));
        if (acquired.outcome == AcquireOutcome::hit) {
            CHECK(stage_.cache.is_right(acquired, stage_.spaces[0], chain(prompt, acquired.boundary / 16)));
            CHECK(stage_.cache->leases().release(session_, acquired.lease));
        }
    }

    void save() {
        const Space space = stage_.spaces[random_() % stage_.spaces.size()];
        const Hashes hashes = chain(random_() % kPrompts, 1 + random_() % kBlocks);
        const TenantNumber tenant = stage_.tenants[random_() % stage_.tenants.size()];
        if (random_() % 4 != 0) {
            stage_.cache.put(session_, space, hashes, tenant);
            return;
        }
        const std::vector<Ticket> tickets = stage_.cache.reserve(session_, space, hashes, tenant);
        stage_.cache.write(session_, space, hashes, tickets);
        if (random_() % 2 == 0) {
            stage_.cache.commit(session_, space, hashes, tickets, 0);  // one shard of two, perhaps
        }
        const std::size_t aborted = stage_.cache->reservations().abort(session_, tickets);
        CHECK(aborted <= tickets.size());
        CHECK_EQUAL(stage_.cache->reservations().abort(session_, tickets), 0u);
    }

    void maintain(std::uint64_t which) {
        if (which == 80) {
            stage_.cache->removals().evict(random_() % 200000);
        } else if (which == 81) {
            stage_.cache->reclaim_ended();
        } else if (which == 82 && random_() % 20 == 0) {
            stage_.cache->removals().clear(namespace_of(stage_.spaces[random_() % 2]));
        } else if (which == 83 && stage_.shrinks) {
            PopulateProgress progress;
            if (random_() % 2 == 0) {
                CHECK(stage_.cache->growth().shrink(kSegmentBytes).ok());
            } else {
                CHECK(stage_.cache->growth().grow(progress).ok());
            }
        } else {
            const CacheStats stats = stage_.cache->stats();
            CHECK(stats.used_bytes <= stats.capacity_bytes);
        }
    }

    // Leaves leases and reservations to the thread that reclaims ended sessions.
    void renew_session() {
        stage_.cache.reserve(session_, stage_.spaces[0], chain(random_() % kPrompts, 3));
        CHECK(stage_.cache->sessions().quarantine(session_));
        leases_.clear();
        stage_.cache->reclaim_ended();
        session_ = open();
    }

    Stage& stage_;
    std::mt19937_64 random_;
    SessionId session_;
    std::vector<LeaseId> leases_;
};

void play(const std::string& policy, Verify verify, std::size_t operations, Growth growth = Growth::full,
          bool shrinks = false) {
    Stage stage(policy, verify, growth);
    stage.shrinks = shrinks;
    std::mutex mutex;
    std::string failure;
    std::vector<std::thread> threads;
    threads.emplace_back([&] {
        PopulateProgress progress;
        if (const Status status = stage.cache->growth().grow_fully(progress); !status.ok()) {
            const std::lock_guard lock(mutex);
            failure = status.message();
        }
    });
    for (std::size_t i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
            try {
                Actor actor(stage, i * 7919 + 1);
                for (std::size_t step = 0; step < operations; ++step) {
                    actor.act();
                }
                actor.finish();
            } catch (const std::exception& fault) {
                const std::lock_guard lock(mutex);
                failure = fault.what();
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(failure, "");
    CHECK(stage.served > 0);

    stage.cache->reclaim_ended();
    const CacheStats stats = stage.cache->stats();
    CHECK_EQUAL(stats.sessions + stats.leases + stats.reserved + stats.quarantined + stats.mismatches, 0u);
    std::uint64_t by_tenants = 0;
    for (const auto& tenant : stats.tenants) {
        by_tenants += tenant.used_bytes;
    }
    CHECK_EQUAL(by_tenants, stats.used_bytes);
    const SessionId last = stage.cache.session();
    for (std::uint64_t prompt = 0; prompt < kPrompts; ++prompt) {
        for (const Space space : stage.spaces) {
            for (std::size_t block = 0; block < kBlocks; ++block) {
                if (const auto lease = stage.cache.take(last, space, chain(prompt, 1, block))) {
                    CHECK(stage.cache->leases().release(last, lease->lease));
                }
            }
        }
    }
    stage.cache->removals().evict(~0ull);
    CHECK_EQUAL(stage.cache->stats().used_bytes, 0u);
    CHECK_EQUAL(stage.cache->stats().readable, 0u);
}

}  // namespace

TEST(every_policy_under_eight_threads) {
    for (const std::string_view policy : policy_names()) {
        play(std::string(policy), Verify::adopted, 1200);
    }
}

TEST(with_every_use_checked) { play("lru", Verify::always, 1200); }

TEST(while_it_grows) { play("prefix", Verify::adopted, 600, Growth::first_step); }

TEST(while_it_shrinks_and_grows) { play("prefix", Verify::always, 1200, Growth::full, true); }

TEST(a_successor_under_eight_threads) {
    // Adopted records are checked while others use, evict and replace them.
    SmallCache cache(small_options(1));
    const Space space = cache.open(plain_geometry(2000));
    const SessionId writer = cache.session();
    for (std::uint64_t prompt = 0; prompt < 100; ++prompt) {
        CHECK_EQUAL(cache.put(writer, space, chain(prompt, 20)), 20u);
    }
    cache.restart();
    std::atomic<std::uint64_t> failures = 0;
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < kThreads; ++i) {
        threads.emplace_back([&, i] {
            try {
                const SessionId session = cache.session();
                std::mt19937_64 random(i);
                for (int step = 0; step < 1000; ++step) {
                    const Hashes hashes = chain(random() % 100, 1 + random() % 20);
                    if (const auto lease = cache.take(session, space, hashes)) {
                        CHECK(cache->leases().release(session, lease->lease));
                    } else {
                        cache.put(session, space, hashes);
                    }
                }
            } catch (const std::exception&) {
                ++failures;
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(failures.load(), 0u);
    CHECK_EQUAL(cache->stats().mismatches, 0u);
    CHECK_EQUAL(cache->stats().quarantined, 0u);
}

// A cache is killed at random instructions under load, again and again, and taken over each time.
//
//     test_adoption_kills [KILLS] [SEED] [signal]
//
// Most kills are aimed: at a kind of call, there at a store to the index, at a function of the core, or at any of the
// call's instructions. Where a process may not be traced, or with `signal`, it is killed from outside after a random
// time.
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "child_process.hpp"
#include "kill_victim.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kKills = 60;  // a sanitized call takes many times the instructions
#else
constexpr std::uint64_t kKills = 250;
#endif

// Small numbers as often as large ones.
std::uint64_t draw_log(std::mt19937_64& random, double most) {
    const double part = static_cast<double>(random() >> 11) / static_cast<double>(std::uint64_t{1} << 53);
    return static_cast<std::uint64_t>(std::exp(part * std::log(most)));
}

// How much of something a kind of call has, from those that came to their end: so that most are cut short before it.
class CallLength {
public:
    void see(std::uint64_t length) {
        mean_ = count_ == 0 ? static_cast<double>(length) : 0.7 * mean_ + 0.3 * static_cast<double>(length);
        ++count_;
    }
    // Draws a number of at least 1.
    std::uint64_t draw(std::mt19937_64& random, std::uint64_t most) const {
        if (count_ == 0 || random() % 4 == 0) {
            return draw_log(random, static_cast<double>(most));
        }
        return 1 + random() % static_cast<std::uint64_t>(1.2 * mean_ + 1);
    }

private:
    double mean_ = 0;
    std::uint64_t count_ = 0;
};

struct CallLengths {
    CallLength steps;
    CallLength changes;              // of the index
    std::array<CallLength, 8> hits;  // by place
};

constexpr std::uint64_t kMostSteps = 10000;

struct Tally {
    std::uint64_t kills = 0;
    std::uint64_t steps = 0;
    std::uint64_t caches = 0;
    std::array<std::uint64_t, static_cast<std::size_t>(Call::count)> by_call{};
    std::array<std::uint64_t, static_cast<std::size_t>(Call::count)> cut_short{};  // and not just behind it
    std::array<CallLengths, static_cast<std::size_t>(Call::count)> lengths{};
};

constexpr std::array<const char*, static_cast<std::size_t>(Call::count)> kCallNames = {
    "none",         "adopt",           "reserve", "reserve_large", "commit",        "abort",
    "acquire",      "acquire_entries", "release", "invalidate",    "clear",         "evict",
    "open_session", "end_session",     "reclaim", "open_tenant",   "open_namespace"};

template <typename Function>
std::uintptr_t address_of(Function function) {
    std::uintptr_t address = 0;
    static_assert(sizeof(function) >= sizeof(address));
    std::memcpy(&address, &function, sizeof(address));
    return address;
}

// Functions that a call runs through, called from other files of the core and so surely there.
std::vector<std::uintptr_t> places_of(Call call) {
    const std::uintptr_t insert = address_of(&Table::insert);
    const std::uintptr_t erase = address_of(&Table::erase);
    const std::uintptr_t give_back = address_of(&Arena::free);
    const std::uintptr_t close = address_of(&LeaseTable::close);
    switch (call) {
        case Call::adopt:
            return {address_of(&Arena::claim), address_of(&Arena::claim),      insert,
                    address_of(&Table::reset), address_of(&LeaseTable::adopt), address_of(&SessionTable::adopt)};
        case Call::reserve:
            return {address_of(&Arena::allocate), erase, give_back};
        case Call::reserve_large:
            return {address_of(&Arena::plan_room), address_of(&Arena::finish_move), address_of(&Arena::finish_move),
                    address_of(&Arena::allocate), give_back};
        case Call::commit:
            return {insert};
        case Call::acquire:
        case Call::acquire_entries:
            return {address_of(&LeaseTable::open)};
        case Call::release:
            return {close};
        case Call::reclaim:
            return {close, give_back};
        case Call::abort:
        case Call::invalidate:
        case Call::clear:
        case Call::evict:
            return {give_back};
        default:
            return {};
    }
}

World draw_world(std::mt19937_64& random) {
    World world;
    world.segment_bytes = 1 << 20;
    world.extent_bytes = 16 << 10;
    world.chains = 64;
    world.blocks = 16;
    world.record_bytes = {640, 1500, 20000, 1000, 900};
    world.entry_limit = random() % 3 == 0 ? 700 : 1600;  // in some, entries run short before memory does
    const auto policies = policy_names();
    const std::string_view policy = policies[random() % policies.size()];
    policy.copy(world.policy, sizeof(world.policy) - 1);
    world.policy[std::min(policy.size(), sizeof(world.policy) - 1)] = 0;
    return world;
}

Call draw_call(std::mt19937_64& random) {
    constexpr std::array kCalls = {
        Call::reserve,         Call::reserve,         Call::reserve,       Call::reserve,       Call::reserve_large,
        Call::reserve_large,   Call::reserve_large,   Call::reserve_large, Call::reserve_large, Call::commit,
        Call::commit,          Call::commit,          Call::commit,        Call::acquire,       Call::acquire,
        Call::acquire_entries, Call::acquire_entries, Call::release,       Call::release,       Call::release,
        Call::abort,           Call::invalidate,      Call::clear,         Call::evict,         Call::open_session,
        Call::open_session,    Call::end_session,     Call::reclaim,       Call::reclaim,       Call::open_tenant,
        Call::open_namespace,  Call::adopt,           Call::adopt,         Call::adopt,         Call::adopt};
    return kCalls[random() % kCalls.size()];
}

// One cache with all its owners, one after the other.
class Chain {
public:
    Chain(std::mt19937_64& random, Tally& tally, bool is_traced)
        : random_(random), tally_(tally), keeper_([](const Line& line) {
              line.await();
              return 0;
          }) {
        stage_->model.world = draw_world(random_);
        stage_->keeper = keeper_.pid();
        stage_->is_traced = is_traced;
        ++tally_.caches;
    }

    void run(std::uint64_t kills) {
        give_birth();
        for (std::uint64_t i = 0; i < kills && is_whole_; ++i) {
            kill_one(draw_call(random_));
        }
        keeper_.send_signal(SIGKILL);
        keeper_.wait_zombie();
        stage_->orders = {.seed = random_(), .acquires_all = true, .is_last = true, .is_keeper_alive = false};
        TracedChild last([this] { return KillVictim(*stage_).run([this]() -> CacheCore& { return adopt(); }); });
        expect(last.wait() == TracedChild::Event::ended && last.code() == 0, last);
    }

private:
    // The first owner makes the cache and hands us its files.
    void give_birth() {
        int ends[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
            throw std::runtime_error("socketpair failed");
        }
        const FileDescriptor ours(ends[0]);
        FileDescriptor theirs(ends[1]);
        stage_->orders = {.seed = random_(), .call = Call::commit, .operations = 250};
        TracedChild first([&] {
            return KillVictim(*stage_).run([&]() -> CacheCore& {
                PopulateProgress progress;
                core_ = std::move(CacheCore::create(stage_->model.world.options(), progress).value());
                send_files(theirs.number(), core_->memory().files());
                return *core_;
            });
        });
        theirs = FileDescriptor();
        files_ = receive_files(ours.number());
        reader_ = std::make_unique<IndexReader>(files_.index.number(),
                                                plan_regions(stage_->model.world.entry_limit).file_bytes);
        cut_short(first, Call::commit);
    }

    void kill_one(Call call) {
        stage_->orders = {.seed = random_(),
                          .call = call,
                          .operations = static_cast<std::uint32_t>(random_() % 40),
                          .acquires_all = random_() % 2 == 0};
        TracedChild victim([this] { return KillVictim(*stage_).run([this]() -> CacheCore& { return adopt(); }); });
        cut_short(victim, call);
    }

    // The child calls this. Its descriptors are its own copies.
    CacheCore& adopt() {
        auto adopted = CacheCore::adopt(std::move(files_), stage_->model.world.options());
        CHECK(adopted.ok());
        core_ = std::move(adopted.value());
        return *core_;
    }

    void cut_short(TracedChild& victim, Call call) {
        TracedChild::Event event = stage_->is_traced ? victim.wait() : victim.wait_until(stage_->is_armed);
        expect(event != TracedChild::Event::ended, victim);
        if (stage_->is_traced) {
            if (stage_->is_serving) {
                compare_reader();
            }
            event = cut_traced(victim, call);
            expect(event != TracedChild::Event::ended, victim);
        } else {
            wait_a_while();
        }
        tally_.cut_short[static_cast<std::size_t>(call)] += event != TracedChild::Event::stopped;
        victim.kill_and_reap();
        expect(victim.code() == -SIGKILL, victim);  // untraced, it may have found something meanwhile
        ++tally_.kills;
        ++tally_.by_call[static_cast<std::size_t>(call)];
        is_whole_ = stage_->is_model_whole;
        look_up_all();
    }

    // In the midst of a call, or now and then just behind it. Some are too short for that, and others are tried.
    TracedChild::Event cut_traced(TracedChild& victim, Call& call) {
        constexpr int kTries = 8;
        TracedChild::Event event = TracedChild::Event::stopped;
        for (int i = 0; i < kTries; ++i) {
            if (i > 0 && (event = victim.go_on()) != TracedChild::Event::stopped) {
                return event;
            }
            call = call == Call::adopt ? call : stage_->model.pending.call;
            event = go_to_place(victim, call);
            if (event != TracedChild::Event::stopped || call == Call::adopt || random_() % 16 == 0) {
                return event;
            }
        }
        return event;
    }

    TracedChild::Event go_to_place(TracedChild& victim, Call call) {
        CallLengths& lengths = tally_.lengths[static_cast<std::size_t>(call)];
        const std::vector<std::uintptr_t> places = places_of(call);
        if (!places.empty() && random_() % 2 == 0) {
            const std::size_t place = random_() % places.size();
            std::uint32_t hits = 0;
            const TracedChild::Event event =
                victim.go_to(places[place], static_cast<std::uint32_t>(lengths.hits[place].draw(random_, 20)), hits);
            if (event != TracedChild::Event::reached) {
                lengths.hits[place].see(hits);
                return event;
            }
            return random_() % 3 == 0 ? step_on(victim, draw_log(random_, 3000)) : step_to_change(victim, 12, nullptr);
        }
        if (random_() % 3 != 0) {
            return step_to_change(victim, 40, &lengths.changes);
        }
        const std::uint64_t steps = std::min(lengths.steps.draw(random_, kMostSteps), kMostSteps);
        const std::uint64_t before = tally_.steps;
        const TracedChild::Event event = step_on(victim, steps);
        if (event == TracedChild::Event::stopped) {
            lengths.steps.see(tally_.steps - before);
        }
        return event;
    }

    // To a store to the index, or a few instructions behind it.
    TracedChild::Event step_to_change(TracedChild& victim, std::uint64_t most, CallLength* length) {
        const std::uint64_t changes =
            length != nullptr ? length->draw(random_, most) : draw_log(random_, static_cast<double>(most));
        IndexWatch watch(reader_->view());
        std::uint64_t seen = 0;
        for (std::uint64_t i = 0; i < kMostSteps && seen < changes; ++i) {
            if (const TracedChild::Event event = step(victim); event != TracedChild::Event::stepped) {
                if (length != nullptr) {
                    length->see(seen);
                }
                return event;
            }
            seen += watch.has_changed();
        }
        return step_on(victim, random_() % 4);
    }

    TracedChild::Event step(TracedChild& victim) {
        ++tally_.steps;
        return victim.step();
    }
    TracedChild::Event step_on(TracedChild& victim, std::uint64_t steps) {
        TracedChild::Event event = TracedChild::Event::stepped;
        for (std::uint64_t i = 0; i < steps && event == TracedChild::Event::stepped; ++i) {
            event = step(victim);
        }
        return event;
    }

    void wait_a_while() {
        volatile std::uint64_t spent = 0;
        for (std::uint64_t left = draw_log(random_, 300000); left > 0; --left) {
            spent = spent + left;
        }
    }

    // A reader that had the index open before sees what the new owner says.
    void compare_reader() {
        const CacheModel& model = stage_->model;
        for (const KeyNumber key : model.all_keys()) {
            CHECK_EQUAL(look_up(key), model.is_readable(key));
        }
    }
    // Looks everything up while no server runs: the answers are true or misses, and they come.
    void look_up_all() {
        const CacheModel& model = stage_->model;
        for (const KeyNumber key : model.all_keys()) {
            CHECK(!look_up(key) || model.is_readable(key) || model.pending.call == Call::commit || !is_whole_);
        }
    }
    bool look_up(KeyNumber key) const {
        const CacheModel& model = stage_->model;
        const Space space = model.world.spaces()[model.space_of(key)].space();
        return find_entry(reader_->view(), {read_hash(model.hash(key).data()), space}).entry != kNoEntry;
    }

    void expect(bool is_right, const TracedChild& victim) {
        if (!is_right) {
            throw std::runtime_error("the victim ended with " + std::to_string(victim.code()) + ": " +
                                     stage_->fault.data());
        }
    }

    std::mt19937_64& random_;
    Tally& tally_;
    ChildProcess keeper_;
    SharedItem<Stage> stage_;
    CacheFiles files_;
    std::unique_ptr<IndexReader> reader_;
    std::unique_ptr<CacheCore> core_;  // in the children
    bool is_whole_ = true;
};

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t kills = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : kKills;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    const bool is_traced = !(argc > 3 && std::strcmp(argv[3], "signal") == 0) && TracedChild::can_trace();
    std::mt19937_64 random(seed);
    Tally tally;
    std::printf("%" PRIu64 " kills, seed %" PRIu64 "%s\n", kills, seed,
                is_traced ? "" : ", from outside: no process is traced");
    while (tally.kills < kills) {
        const std::uint64_t cache_seed = random();
        std::mt19937_64 cache_random(cache_seed);
        try {
            Chain chain(cache_random, tally, is_traced);
            chain.run(std::min(kills - tally.kills - 1, 2 + cache_random() % 14));
        } catch (const std::exception& fault) {
            std::printf("FAIL  cache %" PRIu64 " of seed %" PRIu64 ", after kill %" PRIu64 ": %s\n", tally.caches, seed,
                        tally.kills, fault.what());
            return 1;
        }
    }
    std::printf("ok    %" PRIu64 " kills of %" PRIu64 " caches, %" PRIu64 " steps\n", tally.kills, tally.caches,
                tally.steps);
    for (std::size_t call = 1; call < kCallNames.size(); ++call) {
        std::printf("      %4" PRIu64 " %s, %" PRIu64 " of them in its midst\n", tally.by_call[call], kCallNames[call],
                    tally.cut_short[call]);
    }
    return 0;
}

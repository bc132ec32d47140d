// A process that writes is killed at its n-th I/O, n drawn from a seed, and another one looks at what is left.
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <iterator>
#include <thread>

#include "check.hpp"
#include "child_process.hpp"
#include "disk_fixture.hpp"
#include "kill_harness.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::uint32_t kKills = 20;  // KVOFFLOAD_TESTS_DISK_KILLS for more
constexpr std::uint32_t kKillsPerFolder = 10;
constexpr std::uint64_t kMostRecords = 4000;

std::size_t length_of(std::uint64_t number) {
    constexpr std::size_t kLengths[] = {100, 4000, 30000, 70000, 5};
    return kLengths[digest_field::mix(number) % std::size(kLengths)];
}

// Answers that the victim got, read by us when it is dead.
struct Promises {
    std::uint64_t base = 0;  // the number of the first record
    std::atomic<DiskOutcome> outcome[kMostRecords];
    std::atomic<std::uint64_t> next;
    std::atomic<std::uint64_t> io_count;
};

std::size_t count_threads() {
    return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}));
}

// The threads of an engine end on their own time. A child that is forked meanwhile may get the allocator's locks as one
// of them holds them, and waits for ever.
void wait_threads(std::size_t wanted) {
    for (const Instant end = soon(); count_threads() > wanted; std::this_thread::sleep_for(1ms)) {
        CHECK(std::chrono::steady_clock::now() < end);
    }
}

void live_until_killed(DeviceScene& scene, Promises& promises, std::uint64_t seed) {
    const std::uint64_t last_io = 2 + digest_field::mix(seed) % 60;
    scene.plan->set([&promises, last_io](const IoRequest& request) {
        if (request.kind != IoKind::read && ++promises.io_count == last_io) {
            kill(getpid(), SIGKILL);
        }
        return IoFault{};
    });
    scene.open();
    for (std::uint64_t round = 0; promises.next < kMostRecords; ++round) {
        const std::uint64_t first = promises.next;
        const std::uint64_t count = 1 + digest_field::mix(seed * 1000 + round) % 8;
        std::vector<Records> batches;
        for (std::uint64_t number = first; number < std::min(first + count, kMostRecords); ++number) {
            batches.push_back(
                make_records(DiskVerb::put, {promises.base + number}, length_of(number), number % 3 != 0));
            scene.start(batches.back());
        }
        promises.next = first + batches.size();
        scene.step_until([&] {
            bool are_over = true;
            for (std::size_t i = 0; i < batches.size(); ++i) {
                promises.outcome[first + i] = batches[i].outcome();
                are_over = are_over && batches[i].batch->has_ended();
            }
            return are_over;
        });
    }
}

// All that was promised is there, and nothing that is there is wrong.
std::size_t check_survivors(DeviceScene& scene, const Promises& promises, bool may_evict) {
    scene.plan->set({});
    scene.open();
    CHECK(scene.health().state == DeviceState::ready);
    std::size_t found = 0;
    for (std::uint64_t number = 0; number < promises.next; ++number) {
        const Records got = scene.get({promises.base + number}, length_of(number));
        const bool is_found = got.check_found() == 1;
        CHECK(is_found || got.outcome() == DiskOutcome::missing);
        // With O_DIRECT what was written has left the process, so this end cannot lose it either.
        const DiskOutcome promised = promises.outcome[number];
        const bool was_promised = promised == DiskOutcome::durable || promised == DiskOutcome::written;
        CHECK(is_found || may_evict || !was_promised);
        found += is_found ? 1 : 0;
    }
    scene.drop();
    return found;
}

void kill_often(std::uint64_t capacity_segments, const char* engine, DiskCoding coding = DiskCoding::off) {
    const char* const wanted = std::getenv("KVOFFLOAD_TESTS_DISK_KILLS");
    const std::uint32_t kills = wanted != nullptr ? static_cast<std::uint32_t>(std::atoi(wanted)) : kKills;
    const bool may_evict = capacity_segments < 16;
    const std::size_t threads = count_threads();
    std::size_t survivors = 0;
    for (std::uint32_t done = 0; done < kills; done += kKillsPerFolder) {
        DeviceScene scene("disk_kills");
        scene.terms.capacity_bytes = capacity_segments * kSmallSegment;
        scene.terms.io_engine = engine;
        scene.terms.coding = coding;
        const SharedItem<Promises> promises;
        promises->base = coding == DiskCoding::off ? 0 : kAlike;
        for (std::uint32_t i = 0; i < kKillsPerFolder; ++i) {
            promises->io_count = 0;
            wait_threads(threads);
            ChildProcess victim([&](const Line&) {
                live_until_killed(scene, *promises, 1000 * capacity_segments + done + i);
                return 0;
            });
            CHECK_EQUAL(victim.wait_exit(), -SIGKILL);
            survivors += check_survivors(scene, *promises, may_evict);
        }
        CHECK(promises->next > kKillsPerFolder);
    }
    CHECK(survivors > kills);
}

}  // namespace

TEST(what_was_promised_survives_kill_9) {
    kill_often(128, "auto");
#if !defined(__SANITIZE_THREAD__)  // its runtime ends a forked child that starts threads
    kill_often(128, "threads");
#endif
}

TEST(what_was_promised_of_coded_records_survives_kill_9) { kill_often(128, "auto", DiskCoding::on); }

TEST(nothing_wrong_is_served_where_segments_of_coded_records_are_used_again) { kill_often(5, "auto", DiskCoding::on); }

TEST(nothing_wrong_is_served_where_segments_are_used_again) { kill_often(5, "auto"); }

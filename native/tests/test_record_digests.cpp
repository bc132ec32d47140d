#include "copy/record_digests.hpp"

#include <atomic>
#include <chrono>
#include <random>

#include "check.hpp"

using namespace kvo;

namespace {

// Records of two sizes in one piece of memory, which nothing changes.
struct Records {
    Records() {
        pages.block_count = 100;
        pages.groups = {{.record_bytes = 3'000, .runs = {{4096, 3'000, 3'000, 0}}},
                        {.record_bytes = 300'000, .runs = {{1 << 20, 300'000, 300'000, 0}}}};
        std::mt19937_64 random(7);
        for (std::uint8_t& byte : bytes) {
            byte = static_cast<std::uint8_t>(random());
        }
    }

    std::shared_ptr<const CopyPlan> plan(std::uint32_t items) const {
        CopyPlan plan;
        for (std::uint32_t i = 0; i < items; ++i) {
            plan.items.push_back({i % 2, i, reinterpret_cast<std::uint64_t>(bytes.data()) + 1'000 * i});
        }
        return std::make_shared<const CopyPlan>(std::move(plan));
    }

    PageTable pages;
    std::vector<std::uint8_t> bytes = std::vector<std::uint8_t>(500'000);
};

void wait_for(const DigestWork& work) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::minutes(1);
    while (!work.is_done()) {
        CHECK(std::chrono::steady_clock::now() < end);
        std::this_thread::yield();
    }
}

}  // namespace

TEST(every_record_has_its_digest_whoever_made_it) {
    const Records records;
    for (const unsigned threads : {1u, 3u}) {
        const auto digests = std::move(RecordDigests::start(threads, {}).value());
        std::vector<std::shared_ptr<DigestWork>> works;
        for (const std::uint32_t items : {50u, 1u, 0u, 33u}) {
            works.push_back(std::make_shared<DigestWork>(records.plan(items), records.pages));
            digests->submit(works.back());
        }
        for (const auto& work : works) {
            wait_for(*work);
            const std::vector<RunDigest> made = work->take();
            for (std::size_t i = 0; i < made.size(); ++i) {
                CHECK(made[i] == digest_run({records.bytes.data() + 1'000 * i, i % 2 == 0 ? 3'000u : 300'000u}, 0));
            }
        }
    }
}

TEST(what_is_cancelled_ends_without_being_read) {
    const Records records;
    std::atomic<int> reads{0};
    std::shared_ptr<DigestWork> work;
    const auto on_access = [&](const void*, std::uint64_t, bool is_written) {
        CHECK(!is_written);
        ++reads;
        work->cancel();
    };
    const auto digests = std::move(RecordDigests::start(1, on_access).value());
    work = std::make_shared<DigestWork>(records.plan(60), records.pages);
    digests->submit(work);
    wait_for(*work);
    CHECK_EQUAL(reads.load(), 1);
}

TEST(what_was_given_is_made_before_the_end) {
    const Records records;
    const auto work = std::make_shared<DigestWork>(records.plan(70), records.pages);
    {
        const auto digests = std::move(RecordDigests::start(2, {}).value());
        digests->submit(work);
    }
    CHECK(work->is_done());
}

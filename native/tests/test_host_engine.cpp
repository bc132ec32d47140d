#include "copy/host_engine.hpp"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <thread>

#include "check.hpp"
#include "child_process.hpp"
#include "copy_contract.hpp"
#include "gated_engine.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

class HostGround final : public CopyGround {
public:
    explicit HostGround(HostEngineTerms terms) : terms_(std::move(terms)) {}

    std::uint64_t make_pages(std::size_t size_bytes) override { return make(pages_, size_bytes); }
    std::uint64_t make_slots(std::size_t size_bytes) override { return make(slots_, size_bytes); }
    void write_pages(const CopyBytes& bytes) override { std::ranges::copy(bytes, pages_.begin()); }
    void write_slots(const CopyBytes& bytes) override { std::ranges::copy(bytes, slots_.begin()); }
    CopyBytes read_pages() override { return pages_; }
    CopyBytes read_slots() override { return slots_; }

    std::unique_ptr<CopyEngine> open(PageTable pages, CopyLimits limits) override {
        terms_.limits = limits;
        auto engine = HostEngine::create(std::move(pages), terms_);
        CHECK(engine.ok());
        return std::move(engine.value());
    }

private:
    static std::uint64_t make(CopyBytes& bytes, std::size_t size_bytes) {
        bytes.resize(size_bytes);
        return reinterpret_cast<std::uint64_t>(bytes.data());
    }

    HostEngineTerms terms_;
    CopyBytes pages_, slots_;
};

// Pieces so small that every plan has many.
MakeGround with(unsigned threads, std::uint64_t piece_bytes) {
    return
        [=] { return std::make_unique<HostGround>(HostEngineTerms{.threads = threads, .piece_bytes = piece_bytes}); };
}

}  // namespace

TEST(every_byte_is_right) {
    check_every_byte(with(2, 1 << 20), 60);
    check_every_byte(with(3, 257), 60);
    check_every_byte(with(1, 5000), 20);
}

TEST(plans_that_share_bytes_keep_their_order) {
    check_order(with(3, 1000), 60);
    check_order(with(4, 1 << 20), 30);
    check_order(with(1, 4096), 10);
}

TEST(tickets_count_and_are_told_once) { check_tickets(with(2, 300)); }
TEST(a_wrong_plan_is_refused_and_does_no_harm) { check_refusals(with(2, 300)); }
TEST(plans_under_way_are_bounded) { check_limits(with(2, 300)); }
TEST(closing_ends_all_and_leaves_the_memory_alone) { check_close(with(2, 2000), 40); }

// The cost of a load is estimated from this time: it must not grow because other plans were in front of it.
TEST(what_a_plan_waited_for_is_not_the_time_that_it_was_copied) {
    GatedEngine gated(1);
    gated.gate.hold(1);
    gated.submit(CopyDirection::load, 1, 0);
    gated.submit(CopyDirection::load, 2, 1);
    gated.gate.await(1);
    const auto held = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - held < std::chrono::milliseconds(2)) {
    }
    const auto freed = std::chrono::steady_clock::now();
    gated.gate.let_go();
    CHECK(gated.engine->fence(kCopyTimeoutMs));
    const std::vector<FinishedCopy> finished = gated.engine->poll();
    const auto after = std::chrono::steady_clock::now();
    CHECK_EQUAL(finished.size(), 2u);
    CHECK_EQUAL(finished[1].ticket, CopyTicket{2});
    CHECK(finished[0].copied >= freed - held);
    CHECK(finished[1].copied.count() > 0);
    CHECK(finished[1].copied <= after - freed);
}

TEST(a_plan_without_bytes_is_copied_in_no_time) {
    GatedEngine gated(1);
    CHECK(gated.engine->submit({}, {}).ok());
    CHECK(gated.engine->fence(kCopyTimeoutMs));
    CHECK_EQUAL(gated.engine->poll()[0].copied.count(), 0);
}

// Larger than what is copied through the caches, and not aligned to anything.
TEST(large_plans_are_right) {
    std::mt19937_64 random(66);
    CopyLayout layout;
    layout.table.block_count = 6;
    GroupPages group;
    for (int i = 0; i < 5; ++i) {
        group.runs.push_back({layout.page_bytes + 3, 150'001, 150'000, group.record_bytes});
        group.record_bytes += 150'000;
        layout.page_bytes += 6 * 150'001 + 3;
    }
    layout.table.groups = {group};
    layout.slot_bytes = 7 * group.record_bytes;
    CopyTrial trial(with(3, 1 << 18), layout, random);
    for (const bool has_digests : {true, false}) {
        for (const CopyDirection direction : {CopyDirection::save, CopyDirection::load}) {
            CopyPlan plan{direction, has_digests, {}};
            for (std::uint32_t block : {5U, 0U, 2U, 1U}) {
                plan.items.push_back({0, block, trial.slots_at() + 13 + block * group.record_bytes});
            }
            trial.submit(plan);
            trial.check_all();
        }
    }
}

TEST(wrong_pages_and_terms_are_refused) {
    const PageTable gap{.block_count = 1, .groups = {{.record_bytes = 8, .runs = {{64, 8, 8, 1}}}}};
    CHECK(HostEngine::create(gap, {}).fault().code() == Code::invalid);
    CHECK(HostEngine::create({}, {.threads = 100'000}).fault().code() == Code::invalid);
    CHECK(HostEngine::create({}, {.piece_bytes = 0}).fault().code() == Code::invalid);
    CHECK(HostEngine::create({}, {.limits = {.plans = 0}}).fault().code() == Code::invalid);
    const auto engine = HostEngine::create({}, {});
    CHECK(engine.ok());
    CHECK(engine.value()->thread_count() >= 1);
    CHECK(engine.value()->thread_count() <= 8);
}

TEST(a_load_does_not_wait_for_saves_of_other_blocks) {
    GatedEngine it(2);
    it.gate.hold(1);
    it.submit(CopyDirection::save, 0, 0);
    it.gate.await(1);
    const CopyTicket load = it.submit(CopyDirection::load, 1, 1);
    it.gate.await(load);
    std::vector<FinishedCopy> told;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kCopyTimeoutMs);
    while (told.empty() && std::chrono::steady_clock::now() < end) {
        told = it.engine->poll();
        std::this_thread::yield();
    }
    CHECK_EQUAL(told.size(), std::size_t{1});
    CHECK_EQUAL(told.front().ticket, load);
    CHECK(!it.engine->fence(0));
    it.gate.let_go();
    CHECK(it.engine->fence(kCopyTimeoutMs));
    CHECK_EQUAL(int{it.slots[0]}, 1);
    CHECK_EQUAL(int{it.pages[4096]}, 2);
}

TEST(what_shares_bytes_waits_however_many_threads_are_idle) {
    GatedEngine it(4);
    it.gate.hold(1);
    it.submit(CopyDirection::save, 0, 0);
    it.gate.await(1);
    const CopyTicket same_block = it.submit(CopyDirection::load, 0, 1);
    const CopyTicket same_slot = it.submit(CopyDirection::load, 2, 0);
    const CopyTicket neither = it.submit(CopyDirection::load, 3, 3);
    it.gate.await(neither);
    CHECK(!it.gate.has_entered(same_block));
    CHECK(!it.gate.has_entered(same_slot));
    it.gate.let_go();
    CHECK(it.engine->fence(kCopyTimeoutMs));
    CHECK_EQUAL(int{it.slots[0]}, 1);
    CHECK_EQUAL(int{it.pages[0]}, 2);
    CHECK_EQUAL(int{it.pages[2 * 4096]}, 1);
}

TEST(poll_and_submit_do_not_wait_for_a_copy) {
    GatedEngine it(1);
    it.gate.hold(1);
    it.submit(CopyDirection::save, 0, 0);
    it.gate.await(1);
    CHECK(it.engine->poll().empty());
    it.submit(CopyDirection::save, 1, 1);
    CHECK(it.engine->poll().empty());
    CHECK(!it.engine->fence(0));
    it.gate.let_go();
    CHECK(it.engine->fence(kCopyTimeoutMs));
    CHECK_EQUAL(it.engine->poll().size(), std::size_t{2});
}

TEST(a_plan_that_cannot_be_prepared_fails_alone) {
    CopyBytes pages(64 * 8, 1), slots(64 * 8, 2);
    const auto base = GatedEngine::address(pages);
    PageTable table{.block_count = 8, .groups = {{.record_bytes = 64, .runs = {{base, 64, 64, 0}}}}};
    HostEngineTerms terms{.threads = 2};
    terms.before_prepare = [](CopyTicket ticket) { ticket % 2 == 0 ? throw std::bad_alloc() : void(); };
    const auto engine = std::move(HostEngine::create(std::move(table), std::move(terms)).value());
    // Of a slot that all write, and to which one that failed must not hold the next.
    for (std::uint32_t block = 0; block < 8; ++block) {
        CHECK(engine->submit({CopyDirection::save, false, {{0, block, GatedEngine::address(slots)}}}, {}).ok());
    }
    CHECK(engine->fence(kCopyTimeoutMs));
    const std::vector<FinishedCopy> all = engine->poll();
    CHECK_EQUAL(all.size(), std::size_t{8});
    for (const FinishedCopy& finished : all) {
        CHECK_EQUAL(finished.status.ok(), finished.ticket % 2 == 1);
        CHECK(finished.status.ok() || finished.status.message() == "no memory");
    }
    CHECK_EQUAL(int{slots[0]}, 1);
}

TEST(a_plan_that_fails_on_the_way_fails_alone) {
    CopyBytes pages(64 * 64, 1), slots(64 * 64, 2);
    const auto base = GatedEngine::address(pages);
    PageTable table{.block_count = 64, .groups = {{.record_bytes = 64, .runs = {{base, 64, 64, 0}}}}};
    HostEngineTerms terms{.threads = 3, .piece_bytes = 64};
    terms.before_piece = [](CopyTicket ticket) { ticket % 2 == 0 ? throw std::bad_alloc() : void(); };
    const auto engine = std::move(HostEngine::create(std::move(table), std::move(terms)).value());
    for (std::uint32_t plan = 0; plan < 8; ++plan) {
        CopyPlan eight{CopyDirection::save, true, {}};
        for (std::uint32_t block = 8 * plan; block < 8 * plan + 8; ++block) {
            eight.items.push_back({0, block, GatedEngine::address(slots) + 64 * block});
        }
        CHECK(engine->submit(std::move(eight), {}).ok());
    }
    CHECK(engine->fence(kCopyTimeoutMs));
    const std::vector<FinishedCopy> all = engine->poll();
    CHECK_EQUAL(all.size(), std::size_t{8});
    for (const FinishedCopy& finished : all) {
        CHECK_EQUAL(finished.status.ok(), finished.ticket % 2 == 1);
        CHECK_EQUAL(finished.digests.size(), std::size_t{finished.ticket % 2 == 1 ? 8U : 0U});
        CHECK_EQUAL(int{slots[512 * (finished.ticket - 1)]}, finished.ticket % 2 == 1 ? 1 : 2);
    }
}

TEST(close_gives_up_in_time_and_says_that_the_memory_must_stay) {
    GatedEngine it(2, 64);
    it.gate.hold(1);
    it.submit(CopyDirection::save, 0, 0);
    it.gate.await(1);
    const CopyTicket waiting = it.submit(CopyDirection::load, 0, 1);
    const Status status = it.engine->close(1);
    CHECK(status.code() == Code::failed);
    CHECK(status.message().find("must stay") != std::string::npos);

    it.gate.let_go();
    CHECK(it.engine->close(kCopyTimeoutMs).ok());
    const std::vector<FinishedCopy> told = it.engine->poll();
    CHECK_EQUAL(told.size(), std::size_t{2});
    for (const FinishedCopy& finished : told) {
        CHECK(!finished.status.ok());
        const std::string when = finished.ticket == waiting ? "before" : "during";
        CHECK(finished.status.message().find(when) != std::string::npos);
    }
    CHECK_EQUAL(int{it.pages[0]}, 1);
}

TEST(close_lets_what_runs_end) {
    GatedEngine it(2, 64);
    it.gate.hold(1);
    it.submit(CopyDirection::save, 0, 0);
    it.gate.await(1);
    std::thread other([&] {
        while (it.engine->submit({}, {}).ok()) {
            std::this_thread::yield();
        }
        it.gate.let_go();
    });
    CHECK(it.engine->close(kCopyTimeoutMs).ok());
    other.join();
    for (const FinishedCopy& finished : it.engine->poll()) {
        CHECK(finished.ticket != 1 || finished.status.ok());
    }
    CHECK(std::ranges::all_of(std::span(it.slots).first(4096), [](std::uint8_t byte) { return byte == 1; }));
}

TEST(several_may_close_at_once) {
    for (int round = 0; round < 20; ++round) {
        GatedEngine it(2, 64);
        it.gate.hold(1);
        it.submit(CopyDirection::save, 0, 0);
        it.gate.await(1);
        std::vector<Status> closed(3);
        std::vector<std::thread> closers;
        for (Status& status : closed) {
            closers.emplace_back([&] { status = it.engine->close(kCopyTimeoutMs); });
        }
        while (it.engine->submit({}, {}).ok()) {
            std::this_thread::yield();
        }
        it.gate.let_go();
        for (std::thread& closer : closers) {
            closer.join();
        }
        CHECK(std::ranges::all_of(closed, &Status::ok));
        CHECK(it.engine->close(0).ok());
        CHECK(std::ranges::all_of(std::span(it.slots).first(4096), [](std::uint8_t byte) { return byte == 1; }));
    }
}

TEST(what_is_submitted_while_somebody_closes_is_refused_or_ends) {
    for (int round = 0; round < 50; ++round) {
        GatedEngine it(2);
        std::vector<std::vector<CopyTicket>> taken(3);
        std::vector<std::thread> callers;
        for (std::vector<CopyTicket>& tickets : taken) {
            callers.emplace_back([&] {
                for (int plan = 0; plan < 300; ++plan) {
                    const CopyItem item{0, 1, GatedEngine::address(it.slots)};
                    const Result<CopyTicket> ticket = it.engine->submit({CopyDirection::save, false, {item}}, {});
                    if (!ticket.ok()) {
                        return;
                    }
                    tickets.push_back(ticket.value());
                }
            });
        }
        it.gate.await(1);
        CHECK(it.engine->close(kCopyTimeoutMs).ok());
        for (std::thread& caller : callers) {
            caller.join();
        }
        std::set<CopyTicket> told;
        for (const FinishedCopy& finished : it.engine->poll()) {
            CHECK(told.insert(finished.ticket).second);
        }
        for (const std::vector<CopyTicket>& tickets : taken) {
            CHECK(std::ranges::all_of(tickets, [&](CopyTicket ticket) { return told.erase(ticket) == 1; }));
        }
        CHECK(told.empty());
    }
}

TEST(an_engine_that_goes_waits_for_its_copies) {
    CopyBytes pages(1 << 20, 1), slots(1 << 20, 2);
    {
        PageTable table{.block_count = 256,
                        .groups = {{.record_bytes = 4096, .runs = {{GatedEngine::address(pages), 4096, 4096, 0}}}}};
        const auto engine =
            std::move(HostEngine::create(std::move(table), {.threads = 2, .piece_bytes = 4096}).value());
        for (std::uint32_t block = 0; block < 256; ++block) {
            CHECK(engine->submit({CopyDirection::save, false, {{0, block, GatedEngine::address(slots)}}}, {}).ok());
        }
    }
    std::ranges::fill(slots, 3);
    CHECK(std::ranges::all_of(slots, [](std::uint8_t byte) { return byte == 3; }));
}

TEST(a_forked_child_is_told_whose_engine_it_is) {
    GatedEngine it(2);
    ChildProcess child([&](const Line&) {
        const Result<CopyTicket> refused = it.engine->submit({}, {});
        const bool is_told = !refused.ok() && refused.fault().message().find("a child of it") != std::string::npos;
        const bool is_quiet = it.engine->poll().empty() && !it.engine->fence(0) && it.engine->close(0).ok();
        it.engine.reset();
        return is_told && is_quiet ? 0 : 1;
    });
    CHECK_EQUAL(child.wait_exit(), 0);
    it.submit(CopyDirection::save, 0, 0);
    CHECK(it.engine->fence(kCopyTimeoutMs));
    CHECK_EQUAL(int{it.slots[0]}, 1);
}

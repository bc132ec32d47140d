#include "copy/copy_schedule.hpp"

#include <random>
#include <string>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

constexpr auto kSave = CopyDirection::save;
constexpr auto kLoad = CopyDirection::load;

// One group of 10 bytes a record.
const PageTable& pages() {
    static const PageTable table{.block_count = 100, .groups = {{.record_bytes = 10, .runs = {{1000, 10, 10, 0}}}}};
    return table;
}

CopyPlan plan_of(CopyDirection direction, std::vector<std::pair<std::uint32_t, std::uint64_t>> places) {
    CopyPlan plan{direction, false, {}};
    for (const auto& [block, slot] : places) {
        plan.items.push_back({0, block, slot});
    }
    return plan;
}

// One thread does the work of all of the engine's threads, step by step.
class Hand {
public:
    explicit Hand(std::uint64_t piece_bytes) : schedule(piece_bytes) {}

    std::shared_ptr<CopyJob> submit(CopyPlan plan) {
        auto job = std::make_shared<CopyJob>(std::move(plan));
        job->ticket = ++tickets_;
        schedule.submit(job);
        return job;
    }

    // The next piece, everything prepared that has to be before.
    std::optional<CopyTask> take() {
        while (auto task = schedule.take()) {
            if (task->kind == CopyTask::Kind::piece) {
                return task;
            }
            prepare(*task->job);
        }
        return {};
    }

    void prepare(CopyJob& job) {
        job.runs.emplace(job.plan, pages());
        job.footprint = make_footprint(job.plan, pages());
        job.waits_for = schedule.list_earlier(job);
        std::erase_if(job.waits_for,
                      [&](const auto& earlier) { return !have_order(earlier->footprint, job.footprint); });
        schedule.end_prepare(job, {});
    }

    std::vector<CopyTicket> told() {
        std::vector<CopyTicket> tickets;
        for (const auto& job : schedule.take_ended()) {
            tickets.push_back(job->ticket);
        }
        return tickets;
    }

    CopySchedule schedule;

private:
    CopyTicket tickets_ = 0;
};

using Tickets = std::vector<CopyTicket>;

}  // namespace

TEST(order_matters_where_bytes_are_shared_and_written) {
    struct Row {
        CopyPlan a, b;
        bool has_order;
    };
    const std::vector<Row> rows = {
        {plan_of(kSave, {{1, 100}}), plan_of(kSave, {{2, 200}}), false},
        {plan_of(kSave, {{1, 100}}), plan_of(kSave, {{1, 200}}), false},
        {plan_of(kSave, {{1, 100}}), plan_of(kLoad, {{1, 200}}), true},
        {plan_of(kLoad, {{1, 100}}), plan_of(kLoad, {{1, 200}}), true},
        {plan_of(kLoad, {{1, 100}}), plan_of(kLoad, {{2, 100}}), false},
        {plan_of(kSave, {{1, 100}}), plan_of(kLoad, {{2, 100}}), true},
        {plan_of(kSave, {{1, 100}}), plan_of(kSave, {{2, 109}}), true},
        {plan_of(kSave, {{1, 100}}), plan_of(kSave, {{2, 110}}), false},
        {plan_of(kSave, {{1, 100}}), plan_of(kSave, {{2, 90}}), false},
        {plan_of(kSave, {{1, 100}, {7, 500}}), plan_of(kLoad, {{2, 300}, {9, 10}, {7, 50}}), true},
        {plan_of(kLoad, {{1, 100}, {2, 104}}), plan_of(kSave, {{3, 112}}), true},
        {plan_of(kLoad, {}), plan_of(kLoad, {}), false},
    };
    for (const Row& row : rows) {
        const CopyFootprint a = make_footprint(row.a, pages()), b = make_footprint(row.b, pages());
        CHECK_EQUAL(have_order(a, b), row.has_order);
        CHECK_EQUAL(have_order(b, a), row.has_order);
    }
}

TEST(shared_slots_are_found_as_by_comparing_all) {
    std::mt19937_64 random(74);
    const auto draw = [&] {
        CopyPlan plan{kSave, false, {}};
        for (std::size_t i = random() % 6; i > 0; --i) {
            plan.items.push_back({0, static_cast<std::uint32_t>(random() % 100), 1 + random() % 300});
        }
        return plan;
    };
    for (int round = 0; round < 2000; ++round) {
        const CopyPlan a = draw(), b = draw();
        bool is_shared = false;
        for (const CopyItem& one : a.items) {
            for (const CopyItem& other : b.items) {
                is_shared = is_shared || (one.slot < other.slot + 10 && other.slot < one.slot + 10);
            }
        }
        CHECK_EQUAL(have_order(make_footprint(a, pages()), make_footprint(b, pages())), is_shared);
    }
}

TEST(a_plan_is_cut_into_pieces_and_ends_with_the_last) {
    Hand hand(20);
    const std::shared_ptr<CopyJob> job =
        hand.submit(plan_of(kSave, {{1, 100}, {2, 110}, {3, 120}, {4, 130}, {5, 140}}));
    std::vector<std::uint64_t> ends;
    for (int i = 0; i < 3; ++i) {
        ends.push_back(hand.take()->end);
    }
    CHECK(ends == std::vector<std::uint64_t>({20, 40, 50}));
    CHECK(!hand.take());
    hand.schedule.end_piece(*job, {});
    hand.schedule.end_piece(*job, {});
    CHECK(hand.told().empty());
    CHECK(!hand.schedule.has_ended_up_to(1));
    hand.schedule.end_piece(*job, {});
    CHECK(hand.schedule.has_ended_up_to(1));
    CHECK_EQUAL(hand.schedule.plan_count(), std::size_t{1});
    CHECK(hand.told() == Tickets{1});
    CHECK_EQUAL(hand.schedule.plan_count(), std::size_t{0});
}

TEST(loads_and_saves_take_turns) {
    Hand hand(10);
    hand.submit(plan_of(kSave, {{1, 100}, {2, 110}, {3, 120}}));
    hand.submit(plan_of(kSave, {{4, 200}}));
    hand.submit(plan_of(kLoad, {{5, 300}, {6, 310}}));
    Tickets tickets;
    while (auto task = hand.take()) {
        tickets.push_back(task->job->ticket);
    }
    CHECK(tickets == Tickets({3, 1, 3, 1, 1, 2}));
}

TEST(plans_wait_for_all_that_they_share_bytes_with) {
    Hand hand(1000);
    const std::shared_ptr<CopyJob> save = hand.submit(plan_of(kSave, {{1, 100}}));
    const std::shared_ptr<CopyJob> other = hand.submit(plan_of(kSave, {{2, 200}}));
    hand.submit(plan_of(kLoad, {{1, 300}, {2, 310}}));
    hand.submit(plan_of(kLoad, {{2, 400}}));
    CHECK_EQUAL(hand.take()->job->ticket, CopyTicket{1});
    CHECK_EQUAL(hand.take()->job->ticket, CopyTicket{2});
    CHECK(!hand.take());
    hand.schedule.end_piece(*other, {});
    CHECK(!hand.take());
    hand.schedule.end_piece(*save, {});
    std::optional<CopyTask> third = hand.take();
    CHECK_EQUAL(third->job->ticket, CopyTicket{3});
    CHECK(!hand.take());
    hand.schedule.end_piece(*third->job, {});
    CHECK_EQUAL(hand.take()->job->ticket, CopyTicket{4});
}

TEST(what_ended_while_a_plan_was_prepared_does_not_hold_it) {
    Hand hand(1000);
    const std::shared_ptr<CopyJob> save = hand.submit(plan_of(kSave, {{1, 100}}));
    CHECK_EQUAL(hand.take()->job->ticket, CopyTicket{1});
    const std::shared_ptr<CopyJob> load = hand.submit(plan_of(kLoad, {{1, 300}}));
    const std::optional<CopyTask> preparation = hand.schedule.take();
    CHECK(preparation->kind == CopyTask::Kind::prepare);
    CHECK(!hand.schedule.take());
    load->runs.emplace(load->plan, pages());
    load->waits_for = hand.schedule.list_earlier(*load);
    hand.schedule.end_piece(*save, {});
    hand.told();
    hand.schedule.end_prepare(*load, {});
    CHECK_EQUAL(hand.take()->job->ticket, CopyTicket{2});
}

TEST(a_plan_that_fails_takes_no_other_with_it) {
    Hand hand(10);
    const std::shared_ptr<CopyJob> save = hand.submit(plan_of(kSave, {{1, 100}, {2, 110}, {3, 120}}));
    hand.submit(plan_of(kLoad, {{1, 300}}));
    hand.take();
    hand.take();
    hand.schedule.end_piece(*save, {Code::failed, "first"});
    CHECK(!hand.take());
    hand.schedule.end_piece(*save, {Code::failed, "second"});
    CHECK_EQUAL(save->status.message(), std::string("first"));
    CHECK_EQUAL(hand.take()->job->ticket, CopyTicket{2});

    const std::shared_ptr<CopyJob> unprepared = hand.submit(plan_of(kSave, {{7, 700}}));
    CHECK(hand.schedule.take()->kind == CopyTask::Kind::prepare);
    hand.schedule.end_prepare(*unprepared, {Code::failed, "no memory"});
    CHECK(hand.told() == Tickets({1, 3}));
}

TEST(plans_without_bytes_end_at_once) {
    Hand hand(10);
    hand.submit(plan_of(kSave, {}));
    hand.submit(plan_of(kLoad, {}));
    CHECK(!hand.take());
    CHECK(hand.told() == Tickets({1, 2}));
    CHECK(hand.schedule.is_idle());
}

TEST(dropping_ends_what_has_not_begun_and_then_what_has) {
    Hand hand(10);
    const std::shared_ptr<CopyJob> running = hand.submit(plan_of(kSave, {{1, 100}, {2, 110}}));
    hand.submit(plan_of(kSave, {{3, 200}}));
    hand.take();
    const std::shared_ptr<CopyJob> preparing = hand.submit(plan_of(kLoad, {{1, 300}}));
    hand.submit(plan_of(kLoad, {{9, 400}}));
    // Ticket 2 is prepared on the way to the loads.
    std::optional<CopyTask> task = hand.schedule.take();
    if (task->job->ticket == 2) {
        hand.prepare(*task->job);
        task = hand.schedule.take();
    }
    CHECK_EQUAL(task->job->ticket, CopyTicket{3});

    hand.schedule.drop_waiting({Code::failed, "closed"});
    CHECK(hand.told() == Tickets({2, 4}));
    preparing->runs.emplace(preparing->plan, pages());
    hand.schedule.end_prepare(*preparing, {});
    CHECK(hand.told() == Tickets{3});
    CHECK_EQUAL(preparing->status.message(), std::string("closed"));

    hand.schedule.drop_running({Code::failed, "late"});
    CHECK(!hand.take());
    CHECK(hand.told().empty());
    hand.schedule.end_piece(*running, {});
    CHECK(hand.told() == Tickets{1});
    CHECK_EQUAL(running->status.message(), std::string("late"));
    CHECK(hand.schedule.is_idle());
}

namespace {

PageTable one_group() { return {.block_count = 8, .groups = {{.record_bytes = 8, .runs = {{4096, 8, 8, 0}}}}}; }

std::shared_ptr<const CopyPlan> plan_of(CopyDirection direction, std::uint32_t block, std::uint64_t slot) {
    return std::make_shared<const CopyPlan>(CopyPlan{direction, false, {{0, block, slot}}});
}

}  // namespace

TEST(a_plan_waits_for_earlier_ones_it_shares_bytes_with) {
    const PageTable pages = one_group();
    CopyOrder order;
    order.add(1, plan_of(CopyDirection::save, 1, 100));
    order.add(2, plan_of(CopyDirection::load, 2, 100));  // what the first saves
    order.add(3, plan_of(CopyDirection::load, 3, 200));
    order.add(4, plan_of(CopyDirection::save, 3, 300));  // what the third loads
    order.add(5, plan_of(CopyDirection::save, 1, 400));  // reads what the first reads
    CHECK(order.may_begin(1, pages));
    CHECK(!order.may_begin(2, pages));
    CHECK(order.may_begin(3, pages));
    CHECK(!order.may_begin(4, pages));
    CHECK(order.may_begin(5, pages));
    order.end(1);
    CHECK(order.may_begin(2, pages));
    CHECK(!order.may_begin(4, pages));
    order.end(3);
    CHECK(order.may_begin(4, pages));
}

TEST(a_plan_never_waits_for_a_later_one) {
    const PageTable pages = one_group();
    CopyOrder order;
    order.add(1, plan_of(CopyDirection::load, 1, 100));
    order.add(2, plan_of(CopyDirection::load, 1, 200));
    CHECK(!order.may_begin(2, pages));
    CHECK(order.may_begin(1, pages));
}

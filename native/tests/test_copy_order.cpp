#include "copy/copy_order.hpp"

#include "check.hpp"

using namespace kvo;

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

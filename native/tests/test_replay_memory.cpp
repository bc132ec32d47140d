#include "replay/replay_memory.hpp"

#include <random>
#include <vector>

#include "check.hpp"
#include "replay/make_policy.hpp"
#include "replay/replay.hpp"

using namespace kvo;

namespace {

using Numbers = std::vector<BlockNumber>;

ReplayTrace make_trace(const std::vector<std::vector<std::uint64_t>>& requests) {
    ReplayTrace trace;
    for (const auto& ids : requests) {
        CHECK(trace.add(ids).ok());
    }
    return trace;
}

std::unique_ptr<EvictionPolicy> policy_for(std::string_view name, std::uint64_t capacity) {
    auto policy = make_policy(name, replay_bounds(plain_shape(), capacity));
    CHECK(policy.ok());
    return std::move(policy.value());
}

ReplayMemory make_memory(const ReplayTrace& trace, std::uint64_t capacity) {
    return {trace, capacity, policy_for("lru", capacity)};
}

ReplayAdmission admit(ReplayMemory& memory, const Numbers& blocks, const Numbers& held = {}) {
    const auto made = memory.admit(blocks, held);
    CHECK(made.ok());
    return made.value();
}

class Stubborn final : public EvictionPolicy {
public:
    explicit Stubborn(EntryNumber victim) : victim_(victim) {}
    void admit(const Admission&) override {}
    void touch(std::span<const EntryNumber>) override {}
    EntryNumber choose_victim() override { return victim_; }
    void keep(EntryNumber) override {}
    void remove(EntryNumber, bool) override {}

private:
    EntryNumber victim_;
};

}  // namespace

TEST(what_was_admitted_is_here_until_it_is_evicted) {
    const ReplayTrace trace = make_trace({{1, 2, 3, 4}});
    ReplayMemory memory = make_memory(trace, 2);
    CHECK_EQUAL(admit(memory, {0, 1}).admitted, 2U);
    CHECK_EQUAL(memory.count_prefix(Numbers{0, 1, 2}), 2U);
    CHECK_EQUAL(memory.count_prefix(Numbers{2, 0}), 0U);
    const ReplayAdmission made = admit(memory, {1, 2});
    CHECK_EQUAL(made.admitted, 1U);
    CHECK_EQUAL(made.evicted, 1U);
    CHECK_EQUAL(memory.used_blocks(), 2U);
    CHECK(memory.holds(2));
}

TEST(what_is_held_stays_and_what_does_not_fit_beside_it_is_refused) {
    const ReplayTrace trace = make_trace({{1, 2, 3, 4, 5}});
    ReplayMemory memory = make_memory(trace, 3);
    admit(memory, {0, 1, 2});
    const ReplayAdmission made = admit(memory, {3, 4}, {0, 1});
    CHECK_EQUAL(made.admitted, 1U);
    CHECK_EQUAL(made.evicted, 1U);
    CHECK_EQUAL(made.refused, 1U);
    CHECK(memory.holds(0) && memory.holds(1) && memory.holds(3));
    const ReplayAdmission none = admit(memory, {4}, {0, 1, 3});
    CHECK_EQUAL(none.refused, 1U);
    CHECK_EQUAL(none.evicted, 0U);
    // Naming one twice holds it once.
    CHECK_EQUAL(admit(memory, {4}, {0, 0, 2}).admitted, 1U);
}

TEST(a_touch_passes_over_what_is_not_here) {
    const ReplayTrace trace = make_trace({{1}, {2}, {3}});
    ReplayMemory memory = make_memory(trace, 2);
    admit(memory, {0});
    admit(memory, {1});
    memory.touch(Numbers{2, 0});
    memory.touch(Numbers{2});
    admit(memory, {2});
    CHECK(memory.holds(0) && !memory.holds(1));
}

TEST(a_memory_without_room_takes_nothing) {
    const ReplayTrace trace = make_trace({{1, 2}});
    ReplayMemory memory = make_memory(trace, 0);
    CHECK_EQUAL(admit(memory, {0, 1}).refused, 2U);
    CHECK_EQUAL(memory.used_blocks(), 0U);
}

TEST(one_memory_without_time_is_the_replay) {
    std::mt19937_64 random(7);
    std::vector<std::vector<std::uint64_t>> requests;
    for (int at = 0; at < 600; ++at) {
        std::vector<std::uint64_t> ids;
        const std::uint64_t branch = random() % 40;
        for (std::uint64_t depth = 0; depth < 2 + random() % 12; ++depth) {
            ids.push_back(depth < 2 ? depth : depth + 100 * (depth < 6 ? branch % 5 : branch));
        }
        requests.push_back(ids);
    }
    const ReplayTrace trace = make_trace(requests);
    for (const std::string_view name : policy_names()) {
        for (const std::uint64_t capacity : {9U, 40U, 120U}) {
            const auto policy = policy_for(name, capacity);
            const auto whole = replay(trace, plain_shape(), capacity, *policy);
            CHECK(whole.ok());
            ReplayMemory memory(trace, capacity, policy_for(name, capacity));
            ReplayOutcome sum;
            for (std::size_t at = 0; at < trace.request_count(); ++at) {
                const auto blocks = trace.request(at);
                const std::size_t boundary = memory.count_prefix(blocks);
                memory.touch(blocks.first(boundary));
                const auto made = memory.admit(blocks.subspan(boundary), blocks.first(boundary));
                CHECK(made.ok());
                sum.hits += boundary;
                sum.admitted += made.value().admitted;
                sum.evicted += made.value().evicted;
            }
            CHECK_EQUAL(sum.hits, whole.value().hits);
            CHECK_EQUAL(sum.admitted, whole.value().admitted);
            CHECK_EQUAL(sum.evicted, whole.value().evicted);
        }
    }
}

TEST(a_policy_that_breaks_its_contract_is_told_apart) {
    const ReplayTrace trace = make_trace({{1, 2, 3}});
    ReplayMemory lost(trace, 1, std::make_unique<Stubborn>(7));
    CHECK(lost.admit(Numbers{0}, {}).ok());
    CHECK(lost.admit(Numbers{1}, {}).fault().code() == Code::failed);
    ReplayMemory held(trace, 2, std::make_unique<Stubborn>(0));
    CHECK(held.admit(Numbers{0, 1}, {}).ok());
    CHECK(held.admit(Numbers{2}, Numbers{0}).fault().code() == Code::failed);
}

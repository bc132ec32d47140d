#include "evict/own_numbers.hpp"

#include "check.hpp"
#include "policy_driver.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr PolicyBounds kBounds{.entry_limit = 10'000, .capacity_bytes = 10'000};

std::unique_ptr<EvictionPolicy> make(const std::string& name) { return find_policy(name).value()(kBounds); }

// A policy that lists the numbers of the entries it is told of.
class Listener final : public EvictionPolicy {
public:
    void admit(const Admission& admission) override { heard.push_back(admission.entry); }
    void touch(std::span<const EntryNumber> entries) override {
        heard.insert(heard.end(), entries.begin(), entries.end());
    }
    EntryNumber choose_victim() override { return heard.empty() ? kNoEntry : heard.back(); }
    void spare(EntryNumber entry) override { heard.push_back(entry); }
    void note_tier(EntryNumber entry, bool) override { heard.push_back(entry); }
    void keep(EntryNumber entry) override { heard.push_back(entry); }
    void remove(EntryNumber entry, bool) override { heard.push_back(entry); }

    std::vector<EntryNumber> heard;
};

}  // namespace

TEST(the_order_is_the_same_by_whatever_numbers) {
    for (const std::string name : {"prefix", "lru"}) {
        const auto model = make(name);
        OwnNumbers policy(make(name), std::make_shared<OwnNumbers::Places>());
        PairDriver(policy, *model, 100, 7).run(3000);
    }
}

TEST(numbers_are_as_many_as_there_are_entries) {
    const auto places = std::make_shared<OwnNumbers::Places>();
    auto listener = std::make_unique<Listener>();
    const std::vector<EntryNumber>& heard = listener->heard;
    OwnNumbers policy(std::move(listener), places);
    OwnNumbers other(make("lru"), places);
    CHECK_EQUAL(policy.choose_victim(), kNoEntry);
    for (EntryNumber entry = 0; entry < 3000; ++entry) {
        Admission admission;
        admission.entry = 1'000'000 + entry;
        admission.name = entry + 1;
        admission.size_bytes = 1;
        (entry % 3 == 0 ? static_cast<EvictionPolicy&>(policy) : other).admit(admission);
    }
    CHECK_EQUAL(heard.size(), 1000u);
    CHECK_EQUAL(heard.back(), 999u);
    CHECK_EQUAL(policy.choose_victim(), 1'002'997u);
    policy.touch(std::vector<EntryNumber>{1'000'003, 1'000'000});
    CHECK_EQUAL(heard[1000], 1u);
    CHECK_EQUAL(heard[1001], 0u);
    policy.keep(1'000'006);
    CHECK_EQUAL(heard.back(), 2u);
    policy.spare(1'000'009);
    CHECK_EQUAL(heard.back(), 3u);
    policy.note_tier(1'000'012, true);
    CHECK_EQUAL(heard.back(), 4u);
    // The policy is not told of another's entry.
    policy.spare(1'000'004);
    policy.note_tier(1'000'004, true);
    CHECK_EQUAL(heard.back(), 4u);
    // An entry that one policy loses the other may get, and the number is given again.
    policy.remove(1'000'003, true);
    Admission back;
    back.entry = 1'000'003;
    back.parent = 1'000'004;  // the other's
    other.admit(back);
    CHECK_EQUAL(other.choose_victim(), 1'000'001u);
    Admission next;
    next.entry = 5;
    policy.admit(next);
    CHECK_EQUAL(heard.back(), 1u);
    CHECK_EQUAL(policy.choose_victim(), 5u);
}

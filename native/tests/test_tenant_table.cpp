#include "cache/tenant_table.hpp"

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

namespace {

template <typename T>
T value_of(Result<T> result) {
    CHECK(result.ok());
    return std::move(result.value());
}

// The records of an index and a table over them.
struct Tenants {
    explicit Tenants(const std::string& policy = "lru") : table(open(policy)) {}

    TenantTable open(const std::string& policy, const std::optional<std::vector<TenantTerms>>& wanted = {}) {
        return TenantTable::create(records.data(), value_of(find_policy(policy)),
                                   {.entry_limit = 1000, .capacity_bytes = 1 << 20}, wanted);
    }
    TenantNumber tenant(const std::string& name, std::uint64_t quota) {
        const auto number = table.open(name, quota);
        CHECK(number.ok());
        return number.value();
    }
    void admit(TenantNumber number, EntryNumber entry, std::uint64_t bytes = 10) {
        table.policy_of(number).admit({.entry = entry, .name = entry, .size_bytes = bytes});
        table.add_bytes(number, bytes);
    }
    // The entry that would go; smaller numbers are older.
    EntryNumber victim(std::uint64_t spent = 0, TenantNumber wanting = 0) {
        const std::size_t policy = table.choose_policy([](EntryNumber entry) { return 1000 - entry; }, wanting, spent);
        return policy == TenantTable::kNoPolicy ? kNoEntry : table.policy(policy).choose_victim();
    }

    std::vector<TenantRecord> records = std::vector<TenantRecord>(kTenantLimit);
    TenantTable table;
};

}  // namespace

TEST(names_that_are_none_are_refused_in_one_line) {
    Tenants tenants;
    for (const std::string& name : {std::string(), std::string(56, 'x'), std::string("a\0b", 3)}) {
        const auto refused = tenants.table.open(name, 0);
        CHECK(!refused.ok() && refused.fault().code() == Code::invalid);
        CHECK(refused.fault().message().find('\n') == std::string::npos);
    }
    CHECK_EQUAL(tenants.table.usage().size(), 1u);
    CHECK_EQUAL(tenants.tenant(std::string(55, 'x'), 0), 1);
    CHECK(tenants.table.is_known(1) && !tenants.table.is_known(2));
}

TEST(a_name_has_one_number_and_its_quota_may_change) {
    Tenants tenants;
    const TenantNumber a = tenants.tenant("a", 100);
    const TenantNumber b = tenants.tenant("b", 0);
    CHECK(a != b && a != 0 && b != 0);
    CHECK_EQUAL(tenants.tenant("a", 50), a);
    CHECK_EQUAL(tenants.table.usage()[a].quota_bytes, 50u);
    CHECK(tenants.table.open("a", 0).fault().code() == Code::invalid);
    CHECK(tenants.table.open("b", 5).fault().code() == Code::invalid);
    CHECK_EQUAL(tenants.table.usage()[a].quota_bytes, 50u);

    const TenantTable successor = tenants.open("lru");
    CHECK_EQUAL(successor.usage().size(), 3u);
    CHECK_EQUAL(successor.usage()[a].name, "a");
    CHECK_EQUAL(successor.usage()[a].quota_bytes, 50u);
    CHECK_EQUAL(successor.usage()[b].name, "b");
    CHECK_EQUAL(successor.usage()[b].quota_bytes, 0u);
}

TEST(a_successor_has_the_tenants_that_it_is_told_of) {
    Tenants tenants;
    const TenantNumber a = tenants.tenant("a", 100);
    const TenantNumber b = tenants.tenant("b", 0);
    const TenantNumber c = tenants.tenant("c", 7);
    TenantTable successor = tenants.open("lru", {{{"c", 0}, {"b", 5}}});
    CHECK(!successor.is_known(a) && successor.is_known(b) && successor.is_known(c) && !successor.is_known(c + 1));
    CHECK_EQUAL(successor.usage()[b].quota_bytes, 5u);
    CHECK_EQUAL(successor.usage()[c].quota_bytes, 0u);
    CHECK(successor.share_policy(0, c) && !successor.share_policy(0, b));
    CHECK_EQUAL(tenants.open("lru").usage()[b].quota_bytes, 5u);
    CHECK(!tenants.open("lru").is_known(a));

    // The next tenant gets a number that is free.
    CHECK_EQUAL(value_of(successor.open("new", 3)), a);
    CHECK_EQUAL(value_of(successor.open("last", 3)), c + 1);
    CHECK_EQUAL(tenants.open("lru").usage()[a].name, "new");

    const TenantTable nobodys = tenants.open("lru", {std::vector<TenantTerms>{}});
    CHECK_EQUAL(nobodys.usage().size(), 1u);
    CHECK(nobodys.is_known(0) && !nobodys.is_known(a));
}

TEST(a_record_that_stands_twice_is_one_tenants) {
    Tenants tenants;
    const TenantNumber a = tenants.tenant("a", 100);
    const TenantNumber b = tenants.tenant("b", 100);
    tenants.records[b] = tenants.records[a];
    TenantTable successor = tenants.open("lru", {{{"a", 50}}});
    CHECK_EQUAL(successor.usage().size(), 2u);
    CHECK_EQUAL(value_of(successor.open("a", 60)), a);
    CHECK_EQUAL(value_of(successor.open("b", 60)), b);
}

TEST(there_is_a_bound_of_tenants) {
    Tenants tenants;
    for (std::uint32_t i = 1; i < kTenantLimit; ++i) {
        CHECK_EQUAL(tenants.tenant("tenant " + std::to_string(i), i % 2 * 10), i);
    }
    CHECK(tenants.table.open("one more", 1).fault().code() == Code::failed);
    CHECK_EQUAL(tenants.tenant("tenant 7", 11), 7);
    CHECK_EQUAL(tenants.open("lru").usage().size(), kTenantLimit);
}

TEST(whoever_is_furthest_over_its_quota_loses_first) {
    Tenants tenants;
    const TenantNumber a = tenants.tenant("a", 20);
    const TenantNumber b = tenants.tenant("b", 20);
    CHECK_EQUAL(tenants.victim(), kNoEntry);
    tenants.admit(0, 1);
    tenants.admit(a, 2);
    tenants.admit(b, 3);
    CHECK_EQUAL(tenants.victim(), 1u);  // nobody is over: the oldest
    tenants.admit(a, 4);
    CHECK_EQUAL(tenants.victim(), 1u);  // at its quota, not over it
    tenants.admit(a, 5);
    CHECK_EQUAL(tenants.victim(), 2u);
    for (const EntryNumber entry : {6u, 7u, 8u}) {
        tenants.admit(b, entry);
    }
    CHECK_EQUAL(tenants.victim(), 3u);  // twice its quota, the other one and a half times

    // Tenants that were asked in vain are left out, then the oldest entry goes.
    const std::size_t of_b = tenants.table.choose_policy([](EntryNumber) { return 0u; });
    CHECK_EQUAL(tenants.victim(1ull << of_b), 2u);
    const std::size_t of_a = tenants.table.choose_policy([](EntryNumber) { return 0u; }, 0, 1ull << of_b);
    CHECK_EQUAL(tenants.victim(1ull << of_a | 1ull << of_b), 1u);
    CHECK_EQUAL(tenants.victim(~0ull), kNoEntry);
}

TEST(one_over_its_quota_with_nothing_to_lose_spares_nobody) {
    Tenants tenants;
    const TenantNumber a = tenants.tenant("a", 20);
    tenants.table.add_bytes(a, 100);  // reserved
    CHECK_EQUAL(tenants.victim(), kNoEntry);
    tenants.admit(0, 9);
    CHECK_EQUAL(tenants.victim(), 9u);
    CHECK_EQUAL(tenants.victim(0, a), kNoEntry);  // but for itself
    tenants.table.subtract_bytes(a, 80);
    CHECK_EQUAL(tenants.victim(0, a), 9u);  // it is at its quota, not over it
}

TEST(a_tenant_within_its_quota_loses_nothing_to_those_without_one) {
    Tenants tenants;
    const TenantNumber a = tenants.tenant("a", 20);
    const TenantNumber b = tenants.tenant("b", 20);
    tenants.admit(a, 1);
    tenants.admit(0, 2);
    CHECK_EQUAL(tenants.victim(), 2u);      // the older entry is of a tenant within its quota
    CHECK_EQUAL(tenants.victim(0, b), 2u);  // and the same for another one
    CHECK_EQUAL(tenants.victim(1), kNoEntry);
    CHECK_EQUAL(tenants.victim(1, b), 1u);  // no memory is left without a quota, so there are more promises than memory
}

TEST(tenants_without_quota_share_one_policy) {
    Tenants tenants;
    const TenantNumber a = tenants.tenant("a", 0);
    CHECK(tenants.table.has_one_policy());
    CHECK(tenants.table.share_policy(0, a));
    tenants.admit(a, 1);
    tenants.admit(0, 2);
    CHECK_EQUAL(tenants.victim(), 1u);
    CHECK_EQUAL(tenants.victim(1), kNoEntry);
    const TenantNumber b = tenants.tenant("b", 1);
    CHECK(!tenants.table.has_one_policy());
    CHECK(!tenants.table.share_policy(a, b));
    tenants.table.subtract_bytes(a, 10);
    CHECK_EQUAL(tenants.table.usage()[a].used_bytes, 0u);
    CHECK_EQUAL(tenants.table.usage()[0].used_bytes, 10u);
}

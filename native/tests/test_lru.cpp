#include "replay/lru.hpp"

#include "check.hpp"
#include "policy_driver.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

class LruModel final : public EvictionPolicy {
public:
    void admit(const Admission& made) override { put_behind(queue_, made); }
    void touch(std::span<const EntryNumber> entries) override {
        for (std::size_t at = entries.size(); at-- > 0;) {
            keep(entries[at]);
        }
    }
    EntryNumber choose_victim() override { return oldest(queue_); }
    void keep(EntryNumber entry) override { put_newest(queue_, take(queue_, entry)); }
    void remove(EntryNumber entry, bool) override { take(queue_, entry); }

private:
    ModelQueue queue_;
};

}  // namespace

TEST(of_entries_that_come_together_the_deeper_are_older) {
    LruPolicy policy;
    for (const auto& made : {admission('a'), admission('b', 'a'), admission('c', 'b'), admission('d')}) {
        policy.admit(made);
    }
    CHECK_EQUAL(evict(policy, 9), "cbad");
}

TEST(of_entries_that_are_used_together_the_deeper_are_older) {
    LruPolicy policy;
    for (const char entry : {'a', 'b', 'c', 'd'}) {
        policy.admit(admission(entry));
    }
    touch(policy, "ab");
    CHECK_EQUAL(evict(policy, 9), "cdba");
}

TEST(a_parent_that_is_not_here_is_no_parent) {
    LruPolicy policy;
    policy.admit(admission('a'));
    policy.admit(admission('b'));
    policy.remove(0, true);
    policy.admit(admission('c', 'a'));
    CHECK_EQUAL(evict(policy, 9), "bc");
}

TEST(a_kept_victim_is_the_newest) {
    LruPolicy policy;
    for (const char entry : {'a', 'b', 'c'}) {
        policy.admit(admission(entry));
    }
    policy.keep(policy.choose_victim());
    CHECK_EQUAL(evict(policy, 9), "bca");
}

TEST(agrees_with_a_plain_model) {
    for (unsigned seed = 0; seed < 20; ++seed) {
        LruPolicy policy;
        LruModel model;
        PairDriver(policy, model, 100, seed).run(1500);
    }
}

namespace {

class SlruModel final : public EvictionPolicy {
public:
    explicit SlruModel(PolicyBounds bounds) : limit_(bounds.capacity_bytes / 2) {}

    void admit(const Admission& made) override { put_behind(probation_, made); }
    void touch(std::span<const EntryNumber> entries) override {
        for (std::size_t at = entries.size(); at-- > 0;) {
            put_newest(protected_, take_any(entries[at]));
        }
        demote();
    }
    EntryNumber choose_victim() override { return oldest(probation_.empty() ? protected_ : probation_); }
    void keep(EntryNumber entry) override {
        put_newest(protected_, take_any(entry));
        demote();
    }
    void remove(EntryNumber entry, bool) override { take_any(entry); }

private:
    ModelEntry take_any(EntryNumber entry) { return take(holds(probation_, entry) ? probation_ : protected_, entry); }
    void demote() {
        while (bytes(protected_) > limit_) {
            put_newest(probation_, take(protected_, oldest(protected_)));
        }
    }

    std::uint64_t limit_;
    ModelQueue probation_;
    ModelQueue protected_;
};

}  // namespace

TEST(used_entries_stay_and_half_of_the_bytes_is_the_limit) {
    SlruPolicy policy({10, 4});
    for (const char entry : {'a', 'b', 'c', 'd'}) {
        policy.admit(admission(entry));
    }
    touch(policy, "abc");  // c is the deepest and too much: newest of the others
    CHECK_EQUAL(evict(policy, 9), "dcba");
}

TEST(shares_are_bytes) {
    SlruPolicy policy({10, 20});
    policy.admit(admission('a', 0, 9));
    policy.admit(admission('b', 0, 2));
    policy.admit(admission('c', 0, 2));
    touch(policy, "a");
    touch(policy, "b");  // 11 of 10 bytes
    CHECK_EQUAL(evict(policy, 9), "cab");
}

TEST(leased_entries_are_passed) {
    SlruPolicy policy({10, 4});
    for (const char entry : {'a', 'b', 'c', 'd'}) {
        policy.admit(admission(entry));
    }
    touch(policy, "d");
    std::string offered;
    for (int turn = 0; turn < 8 && offered.find('d') == std::string::npos; ++turn) {
        const EntryNumber victim = policy.choose_victim();
        offered += static_cast<char>('a' + victim);
        policy.keep(victim);
    }
    CHECK(offered.find('d') != std::string::npos);
}

TEST(a_segmented_list_agrees_with_a_plain_model) {
    for (unsigned seed = 0; seed < 20; ++seed) {
        SlruPolicy policy({200, 100});
        SlruModel model({200, 100});
        PairDriver(policy, model, 100, seed).run(1500);
    }
}

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

#include "replay/arc.hpp"

#include "check.hpp"
#include "policy_driver.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

class ArcModel final : public EvictionPolicy {
public:
    explicit ArcModel(PolicyBounds bounds) : capacity_(bounds.capacity_bytes) {}

    void admit(const Admission& made) override {
        const std::uint64_t once = bytes(once_ghosts_);
        const std::uint64_t again = bytes(again_ghosts_);
        if (const std::uint64_t size = take_ghost(once_ghosts_, made.name)) {
            target_ = std::min(capacity_, target_ + size * std::max<std::uint64_t>(1, again / once));
            put_behind(again_, made);
        } else if (const std::uint64_t lost = take_ghost(again_ghosts_, made.name)) {
            const std::uint64_t step = lost * std::max<std::uint64_t>(1, once / again);
            target_ = step > target_ ? 0 : target_ - step;
            put_behind(again_, made);
        } else {
            put_behind(once_, made);
        }
        kept_ = 0;
    }
    void touch(std::span<const EntryNumber> entries) override {
        for (std::size_t at = entries.size(); at-- > 0;) {
            renew(entries[at]);
        }
        kept_ = 0;
    }
    EntryNumber choose_victim() override { return oldest(bytes(once_) > target_ || again_.empty() ? once_ : again_); }
    void keep(EntryNumber entry) override {
        kept_ += 1;
        renew(entry);
    }
    void remove(EntryNumber entry, bool was_evicted) override {
        const bool was_once = holds(once_, entry);
        const ModelEntry gone = take(was_once ? once_ : again_, entry);
        if (!was_evicted) {
            return;
        }
        put_newest(was_once ? once_ghosts_ : again_ghosts_, gone);
        while (bytes(once_) + bytes(once_ghosts_) > capacity_ && !once_ghosts_.empty()) {
            once_ghosts_.pop_back();
        }
        while (bytes(once_) + bytes(once_ghosts_) + bytes(again_) + bytes(again_ghosts_) > 2 * capacity_ &&
               !again_ghosts_.empty()) {
            again_ghosts_.pop_back();
        }
    }

private:
    void renew(EntryNumber entry) { put_newest(again_, take(holds(once_, entry) ? once_ : again_, entry)); }

    static std::uint64_t take_ghost(ModelQueue& ghosts, std::uint64_t name) {
        const auto found = std::ranges::find(ghosts, name, &ModelEntry::name);
        const std::uint64_t size = found == ghosts.end() ? 0 : found->size_bytes;
        if (found != ghosts.end()) {
            ghosts.erase(found);
        }
        return size;
    }

    std::uint64_t capacity_;
    std::uint64_t target_ = 0;
    ModelQueue once_;
    ModelQueue again_;
    ModelQueue once_ghosts_;
    ModelQueue again_ghosts_;
    std::size_t kept_ = 0;
};

void admit_all(EvictionPolicy& policy, const std::string& letters) {
    for (const char letter : letters) {
        policy.admit(admission(letter));
    }
}

}  // namespace

TEST(a_name_that_comes_back_moves_the_border) {
    ArcPolicy policy({100, 4});
    admit_all(policy, "abcd");
    touch(policy, "ab");
    CHECK_EQUAL(evict(policy, 1), "c");
    admit_all(policy, "c");  // missed among those that came once: they get a byte more
    CHECK_EQUAL(policy.once_target_bytes(), 1U);
    CHECK_EQUAL(evict(policy, 2), "ba");  // d alone fills its list's byte
    admit_all(policy, "a");               // and missed among the others
    CHECK_EQUAL(policy.once_target_bytes(), 0U);
    CHECK_EQUAL(evict(policy, 9), "dca");
}

TEST(what_comes_back_says_more_where_less_is_remembered) {
    ArcPolicy policy({100, 8});
    admit_all(policy, "abcdefgh");
    touch(policy, "abcdefg");
    CHECK_EQUAL(evict(policy, 5), "hgfed");  // h had come once: one name against four
    admit_all(policy, "h");
    CHECK_EQUAL(policy.once_target_bytes(), 4U);
}

TEST(what_left_by_itself_is_not_remembered) {
    ArcPolicy policy({100, 4});
    admit_all(policy, "ab");
    policy.remove(0, false);
    CHECK_EQUAL(policy.ghost_count(), 0U);
}

TEST(ghosts_are_bounded_by_number_and_by_bytes) {
    ArcPolicy by_number({8, 1'000'000});
    ArcPolicy by_bytes({1000, 20});
    EntryNumber most_by_number = 0;
    for (std::uint64_t name = 1; name <= 1000; ++name) {
        for (ArcPolicy* policy : {&by_number, &by_bytes}) {
            Admission made = admission('a', 0, 3);
            made.name = name;
            policy->admit(made);
            if (name % 2 == 0) {
                touch(*policy, "a");
            }
            CHECK_EQUAL(evict(*policy, 1), "a");
        }
        most_by_number = std::max(most_by_number, by_number.ghost_count());
        CHECK(by_bytes.ghost_count() <= 13U);  // twice the bytes of three each
    }
    CHECK_EQUAL(most_by_number, 8U);
    CHECK_EQUAL(by_bytes.ghost_count(), 13U);
}

TEST(a_leased_second_list_does_not_hide_the_first) {
    ArcPolicy policy({100, 4});
    admit_all(policy, "abcd");
    touch(policy, "ab");
    CHECK_EQUAL(evict(policy, 1), "c");
    admit_all(policy, "c");  // the first list may have a byte now, and d is that
    std::string offered;
    for (int turn = 0; turn < 4; ++turn) {
        offered += static_cast<char>('a' + policy.choose_victim());
        policy.keep(policy.choose_victim());
    }
    CHECK_EQUAL(offered, "bacd");
}

TEST(agrees_with_a_plain_model) {
    for (unsigned seed = 0; seed < 20; ++seed) {
        ArcPolicy policy({2000, 100});
        ArcModel model({2000, 100});
        PairDriver(policy, model, 100, seed).run(1500);
    }
}

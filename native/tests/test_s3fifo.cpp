#include "replay/s3fifo.hpp"

#include <deque>

#include "check.hpp"
#include "policy_driver.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

class S3FifoModel final : public EvictionPolicy {
public:
    explicit S3FifoModel(PolicyBounds bounds) : capacity_(bounds.capacity_bytes) {}

    void admit(const Admission& made) override {
        const auto ghost = std::ranges::find(ghosts_, made.name, &ModelEntry::name);
        ModelQueue& queue = ghost == ghosts_.end() ? small_ : main_;
        if (ghost != ghosts_.end()) {
            ghosts_.erase(ghost);
        }
        const auto parent = find(queue, made.parent);
        queue.insert(parent == queue.end() || parent->uses > 0 ? queue.begin() : parent + 1,
                     {made.entry, made.name, made.size_bytes});
        kept_ = 0;
    }
    void touch(std::span<const EntryNumber> entries) override {
        kept_ = 0;
        for (const EntryNumber entry : entries) {
            int& uses = find(holds(small_, entry) ? small_ : main_, entry)->uses;
            uses = std::min(uses + 1, 3);
        }
    }
    EntryNumber choose_victim() override {
        if (small_.empty() && main_.empty()) {
            return kNoEntry;
        }
        const bool is_main_kept = kept_ >= main_.size();
        const bool is_small = !small_.empty() && (bytes(small_) > capacity_ / 10 || is_main_kept);
        ModelEntry& last = is_small ? small_.back() : main_.back();
        if (is_small ? last.uses < 2 : last.uses == 0 || is_main_kept) {
            return last.entry;
        }
        ModelEntry moved = take(is_small ? small_ : main_, last.entry);
        moved.uses = is_small ? 0 : moved.uses - 1;
        put_newest(main_, moved);
        return choose_victim();
    }
    void keep(EntryNumber entry) override {
        kept_ += 1;
        put_newest(main_, take(holds(main_, entry) ? main_ : small_, entry));
    }
    void remove(EntryNumber entry, bool was_evicted) override {
        const bool was_small = holds(small_, entry);
        const ModelEntry gone = take(was_small ? small_ : main_, entry);
        if (was_small && was_evicted) {
            put_newest(ghosts_, gone);
        }
        while (bytes(ghosts_) > capacity_ - capacity_ / 10) {
            ghosts_.pop_back();
        }
    }

private:
    std::uint64_t capacity_;
    ModelQueue small_;
    ModelQueue main_;
    ModelQueue ghosts_;
    std::size_t kept_ = 0;
};

void admit_all(EvictionPolicy& policy, const std::string& letters) {
    for (const char letter : letters) {
        policy.admit(admission(letter));
    }
}

}  // namespace

TEST(used_twice_passes_and_once_does_not) {
    S3FifoPolicy policy({100, 10});
    admit_all(policy, "abc");
    touch(policy, "a");
    touch(policy, "ab");
    // a passes, b goes; then one byte of small is left, which is its share, and the main queue gives.
    CHECK_EQUAL(evict(policy, 9), "bac");
}

TEST(who_comes_back_soon_goes_to_the_main_queue) {
    S3FifoPolicy policy({100, 10});
    admit_all(policy, "abc");
    CHECK_EQUAL(evict(policy, 1), "a");
    CHECK_EQUAL(policy.ghost_count(), 1U);
    admit_all(policy, "ad");
    CHECK_EQUAL(policy.ghost_count(), 0U);
    CHECK_EQUAL(evict(policy, 9), "bcad");
}

TEST(used_entries_of_the_main_queue_get_another_round_per_use) {
    S3FifoPolicy policy({100, 10});
    admit_all(policy, "abcd");
    touch(policy, "ab");
    touch(policy, "ab");
    CHECK_EQUAL(evict(policy, 1), "c");  // a and b passed
    touch(policy, "a");
    CHECK_EQUAL(evict(policy, 9), "bad");
}

TEST(a_chain_leaves_from_its_end) {
    S3FifoPolicy policy({100, 10});
    policy.admit(admission('a'));
    policy.admit(admission('b', 'a'));
    policy.admit(admission('c', 'b'));
    policy.admit(admission('d', 'a'));
    CHECK_EQUAL(evict(policy, 9), "cbda");
}

TEST(what_left_by_itself_is_not_remembered) {
    S3FifoPolicy policy({100, 10});
    admit_all(policy, "ab");
    policy.remove(0, false);
    CHECK_EQUAL(policy.ghost_count(), 0U);
}

TEST(ghosts_are_bounded_by_number_and_by_bytes) {
    S3FifoPolicy by_number({8, 1'000'000});
    S3FifoPolicy by_bytes({1000, 20});
    for (std::uint64_t name = 1; name <= 1000; ++name) {
        for (S3FifoPolicy* policy : {&by_number, &by_bytes}) {
            Admission made = admission('a', 0, 3);
            made.name = name;
            policy->admit(made);
            CHECK_EQUAL(evict(*policy, 1), "a");
        }
        CHECK(by_number.ghost_count() <= 8U);
        CHECK(by_bytes.ghost_count() <= 6U);  // 18 bytes of three each
    }
    CHECK_EQUAL(by_number.ghost_count(), 8U);
    CHECK_EQUAL(by_bytes.ghost_count(), 6U);
}

TEST(a_leased_main_queue_does_not_hide_the_small_one) {
    S3FifoPolicy policy({100, 10});
    admit_all(policy, "abcd");
    touch(policy, "abc");
    touch(policy, "abc");
    std::string offered;
    for (int turn = 0; turn < 4; ++turn) {
        offered += static_cast<char>('a' + policy.choose_victim());
        policy.keep(policy.choose_victim());
    }
    CHECK_EQUAL(offered, "abcd");  // d is all that is left of the small queue, which is its share
}

TEST(agrees_with_a_plain_model) {
    for (unsigned seed = 0; seed < 20; ++seed) {
        S3FifoPolicy policy({2000, 100});
        S3FifoModel model({2000, 100});
        PairDriver(policy, model, 100, seed).run(1500);
    }
}

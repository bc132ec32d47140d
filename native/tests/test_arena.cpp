#include "arena/arena.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <tuple>

#include "check.hpp"

using namespace kvo;

namespace {

template <typename T>
T value_of(Result<T> result) {
    CHECK(result.ok());
    return std::move(result.value());
}

constexpr std::uint64_t kKiB = 1024;
constexpr std::uint64_t kMiB = 1024 * kKiB;

Arena make_arena(ArenaShape shape, int segments) {
    Result<Arena> arena = Arena::create(shape);
    CHECK(arena.ok());
    for (int i = 0; i < segments; ++i) {
        CHECK(arena.value().add_segment().ok());
    }
    return std::move(arena.value());
}

using Record = std::tuple<ClassNumber, std::uint64_t, EntryNumber>;

std::vector<Record> records_of(const Arena& arena) {
    std::vector<Record> records;
    arena.for_each_live([&](ClassNumber number, Slot slot, EntryNumber owner) {
        records.emplace_back(number, pack_slot(slot), owner);
    });
    return records;
}

// Knows every record's bytes; an arena that gives out a byte twice is found out.
class ArenaModel {
public:
    ArenaModel(Arena& arena, ArenaShape shape, std::uint64_t seed) : arena_(arena), shape_(shape), random_(seed) {}

    void step() {
        // Small sizes more often, so that each has a part of the pool.
        const std::uint64_t classes = arena_.class_count();
        const auto number = static_cast<ClassNumber>(std::min(random_() % classes, random_() % classes));
        const std::uint64_t choice = random_() % 1000;
        if (choice < 580) {
            allocate(number);
        } else if (choice < 999) {
            free_one();
        } else {
            for (int i = 0; i < 200; ++i) {
                free_one();
            }
        }
    }

    void check_all() const {
        std::uint64_t slot_bytes = 0;
        std::uint64_t record_bytes = 0;
        for (const auto& [owner, record] : records_) {
            CHECK_EQUAL(arena_.owner_at(record.slot), owner);
            slot_bytes += arena_.size_class(record.number).slot_bytes;
            record_bytes += arena_.size_class(record.number).record_bytes;
        }
        const ArenaStats stats = arena_.stats();
        CHECK_EQUAL(stats.live_records, records_.size());
        CHECK_EQUAL(stats.live_slot_bytes, slot_bytes);
        CHECK_EQUAL(stats.live_record_bytes, record_bytes);
        CHECK_EQUAL(records_of(arena_).size(), records_.size());
        std::uint64_t span_bytes = 0;
        for (std::size_t i = 0; i < arena_.class_count(); ++i) {
            const SizeClass& size = arena_.size_class(static_cast<ClassNumber>(i));
            span_bytes += size.spans * size.shape.extents * shape_.extent_bytes;
            CHECK_EQUAL(size.holes + size.live, std::uint64_t{size.spans} * size.shape.slots);
            CHECK(size.spare_spans * size.shape.slots <= size.holes);
        }
        CHECK_EQUAL(span_bytes + stats.free_extents * shape_.extent_bytes, stats.capacity_bytes);
    }

    void free_all() {
        while (!records_.empty()) {
            free_one();
        }
    }

    const Slot& slot_of(EntryNumber owner) const { return records_.at(owner).slot; }
    int finished() const { return finished_; }
    int cancelled() const { return cancelled_; }

private:
    struct Held {
        ClassNumber number = 0;
        Slot slot;
    };

    std::uint64_t begin_of(Slot slot) const {
        const SlotPlace place = arena_.place(slot);
        return place.segment * shape_.segment_bytes + place.offset_bytes;
    }

    void take_bytes(ClassNumber number, Slot slot) {
        const std::uint64_t begin = begin_of(slot);
        const std::uint64_t end = begin + arena_.size_class(number).slot_bytes;
        CHECK(begin / shape_.segment_bytes == (end - 1) / shape_.segment_bytes);
        CHECK(end <= arena_.stats().capacity_bytes);
        const auto next = bytes_.lower_bound(begin);
        CHECK(next == bytes_.end() || next->first >= end);
        CHECK(next == bytes_.begin() || std::prev(next)->second <= begin);
        bytes_[begin] = end;
    }

    void allocate(ClassNumber number) {
        if (const auto slot = arena_.allocate(number, next_owner_)) {
            take_bytes(number, *slot);
            records_[next_owner_++] = {number, *slot};
        } else {
            CHECK_EQUAL(arena_.size_class(number).holes, 0u);
            CHECK(arena_.stats().longest_free_run < arena_.size_class(number).shape.extents);
            make_room(number);
        }
    }

    void free_one() {
        if (records_.empty()) {
            return;
        }
        auto victim = records_.lower_bound(static_cast<EntryNumber>(random_() % next_owner_));
        victim = victim == records_.end() ? records_.begin() : victim;
        bytes_.erase(begin_of(victim->second.slot));
        arena_.free(victim->second.slot);
        records_.erase(victim);
    }

    void make_room(ClassNumber number) {
        const std::uint64_t pinned = random_() % 8;
        const auto plan = arena_.plan_room(number, [&](EntryNumber owner) { return owner % 64 >= pinned; });
        if (!plan) {
            return;
        }
        const bool may_cancel = random_() % 3 == 0;
        std::set<EntryNumber> owners;
        for (const Move& move : plan->moves) {
            CHECK(move.owner % 64 >= pinned);
            CHECK(owners.insert(move.owner).second);
            take_bytes(records_.at(move.owner).number, move.to);
        }
        const std::uint32_t free_before = arena_.stats().free_extents;
        for (const Move& move : plan->moves) {
            Held& held = records_.at(move.owner);
            CHECK(held.slot == move.from);
            const bool is_cancelled = may_cancel && random_() % 4 == 0;
            bytes_.erase(begin_of(is_cancelled ? move.to : move.from));
            if (is_cancelled) {
                arena_.cancel_move(move);
                ++cancelled_;
            } else {
                arena_.finish_move(move);
                held.slot = move.to;
                ++finished_;
            }
        }
        if (!may_cancel && !plan->moves.empty()) {
            const ArenaStats stats = arena_.stats();
            CHECK(stats.free_extents > free_before);
            CHECK(stats.longest_free_run >= arena_.size_class(number).shape.extents || stats.free_extents > 0);
        }
    }

    Arena& arena_;
    ArenaShape shape_;
    std::mt19937_64 random_;
    std::map<EntryNumber, Held> records_;
    std::map<std::uint64_t, std::uint64_t> bytes_;  // taken: begin and end
    EntryNumber next_owner_ = 1;
    int finished_ = 0;
    int cancelled_ = 0;
};

}  // namespace

TEST(shapes_that_make_no_sense_are_refused) {
    for (const ArenaShape shape : {ArenaShape{kMiB, 0}, ArenaShape{0, kMiB}, ArenaShape{3 * kMiB, 2 * kMiB},
                                   ArenaShape{kMiB, 100}, ArenaShape{1ULL << 62, 512}}) {
        CHECK(Arena::create(shape).fault().code() == Code::invalid);
    }
    CHECK(Arena::create({}).ok());
}

TEST(a_size_has_one_class) {
    Arena arena = make_arena({}, 1);
    const ClassNumber number = arena.class_for(5000).value();
    CHECK_EQUAL(arena.class_for(5000).value(), number);
    CHECK(arena.class_for(5001).value() != number);
    CHECK_EQUAL(arena.size_class(number).record_bytes, 5000u);
    CHECK_EQUAL(arena.size_class(number).slot_bytes, 5056u);
    CHECK(arena.class_for(1ULL << 30).ok());
    CHECK(arena.class_for(0).fault().code() == Code::invalid);
    CHECK(arena.class_for((1ULL << 30) + 1).fault().code() == Code::invalid);
    CHECK(arena.class_for(~0ULL).fault().code() == Code::invalid);
    for (std::uint64_t bytes = 100'000; arena.class_count() < 4096; ++bytes) {
        CHECK(arena.class_for(bytes).ok());
    }
    CHECK_EQUAL(arena.class_for(5000).value(), number);
    CHECK(arena.class_for(7).ok());  // none of the others has a record
    CHECK_EQUAL(arena.class_count(), 4096u);
}

TEST(slots_have_addresses) {
    const ArenaShape shape{8 * kMiB, kMiB};
    Arena arena = make_arena(shape, 2);
    const ClassNumber large = arena.class_for(8 * kMiB).value();
    const ClassNumber odd = arena.class_for(100 * kKiB + 1).value();
    CHECK(arena.place(arena.allocate(large, 1).value()) == (SlotPlace{1, 0}));
    std::set<std::uint64_t> offsets;
    for (EntryNumber i = 0; i < 9; ++i) {
        offsets.insert(arena.place(arena.allocate(odd, i).value()).offset_bytes);
    }
    for (std::uint64_t i = 0; i < 9; ++i) {
        CHECK(offsets.contains(i * (100 * kKiB + 512)));
    }
    CHECK(unpack_slot(pack_slot({0xfedcba98, 0x76543210})) == (Slot{0xfedcba98, 0x76543210}));
}

// Slots that are reserved together are copied together, and slots that touch are one run to a copy engine.
TEST(slots_taken_one_after_the_other_lie_in_a_row) {
    const ArenaShape shape{.segment_bytes = 16 * kMiB, .extent_bytes = kMiB};
    Arena arena = make_arena(shape, 1);
    const std::uint64_t record_bytes = 48 * kKiB;  // 64 of them in three extents
    const ClassNumber number = arena.class_for(record_bytes).value();
    const auto take_row = [&](EntryNumber count) {
        std::vector<Slot> slots;
        for (EntryNumber owner = 0; owner < count; ++owner) {
            slots.push_back(arena.allocate(number, owner).value());
        }
        return slots;
    };
    const auto is_row = [&](const std::vector<Slot>& slots) {
        for (std::size_t i = 1; i < slots.size(); ++i) {
            const std::uint64_t before = slot_address(slots[i - 1], shape.extent_bytes, record_bytes);
            if (slot_address(slots[i], shape.extent_bytes, record_bytes) != before + record_bytes) {
                return false;
            }
        }
        return true;
    };
    const std::vector<Slot> first = take_row(64);
    CHECK(is_row(first));
    const std::vector<Slot> second = take_row(64);
    CHECK(is_row(second));
    // A stretch that was freed in any order is a row again.
    for (const std::size_t index : {19u, 17u, 10u, 18u, 11u, 16u, 12u, 15u, 13u, 14u}) {
        arena.free(first[index]);
    }
    CHECK(is_row(take_row(10)));
}

TEST(random_work_never_gives_a_byte_twice) {
    const ArenaShape shape{4 * kMiB, 64 * kKiB};
    int finished = 0;
    int cancelled = 0;
    for (std::uint64_t seed = 0; seed < 8; ++seed) {
        Arena arena = make_arena(shape, 3);
        for (const std::uint64_t bytes : {1500u, 9000u, 70'000u, 200'000u, 1'000'000u}) {
            CHECK(arena.class_for(bytes).ok());
        }
        ArenaModel model(arena, shape, seed);
        for (int step = 0; step < 20000; ++step) {
            model.step();
            if (step == 10000) {
                CHECK(arena.add_segment().ok());
            }
            if (step % 397 == 0) {
                model.check_all();
            }
        }
        model.check_all();
        finished += model.finished();
        cancelled += model.cancelled();
        model.free_all();
        const ArenaStats stats = arena.stats();
        CHECK_EQUAL(stats.live_records, 0u);
        CHECK_EQUAL(stats.spans, 0u);
        CHECK_EQUAL(stats.hole_bytes, 0u);
        CHECK_EQUAL(stats.free_extents, 4u * 64);
        CHECK_EQUAL(stats.longest_free_run, 64u);
    }
    CHECK(finished > 1000);
    CHECK(cancelled > 100);
}

TEST(claims_in_any_order_rebuild_the_arena) {
    const ArenaShape shape{4 * kMiB, 64 * kKiB};
    const std::uint64_t sizes[] = {1500, 9000, 70'000, 200'000, 1'000'000};
    std::mt19937_64 random(21);
    for (std::uint64_t seed = 0; seed < 5; ++seed) {
        Arena arena = make_arena(shape, 3);
        Arena rebuilt = make_arena(shape, 3);
        for (const std::uint64_t bytes : sizes) {
            CHECK_EQUAL(arena.class_for(bytes).value(), rebuilt.class_for(bytes).value());
        }
        ArenaModel model(arena, shape, seed);
        for (int step = 0; step < 20000; ++step) {
            model.step();
        }
        const std::vector<Record> records = records_of(arena);
        std::vector<Record> shuffled = records;
        std::ranges::shuffle(shuffled, random);
        for (const auto& [number, packed, owner] : shuffled) {
            CHECK(rebuilt.claim(number, unpack_slot(packed), owner) == Claim::granted);
        }
        for (const auto& [number, packed, owner] : shuffled) {
            CHECK(rebuilt.claim(number, unpack_slot(packed), owner) == Claim::taken);
        }
        CHECK(records_of(rebuilt) == records);
        const ArenaStats before = arena.stats();
        const ArenaStats after = rebuilt.stats();
        CHECK_EQUAL(after.free_extents, before.free_extents);
        CHECK_EQUAL(after.longest_free_run, before.longest_free_run);
        CHECK_EQUAL(after.hole_bytes, before.hole_bytes);
        CHECK_EQUAL(after.live_record_bytes, before.live_record_bytes);
    }
}

TEST(a_refused_plan_is_not_tried_again_at_once) {
    Arena arena = make_arena({64 * kMiB, kMiB}, 2);
    const ClassNumber small = arena.class_for(4 * kKiB).value();
    const ClassNumber large = arena.class_for(24 * kMiB).value();
    CHECK(arena.can_make_room(large));  // it is empty
    std::vector<Slot> slots;
    while (const auto slot = arena.allocate(small, static_cast<EntryNumber>(slots.size()))) {
        slots.push_back(*slot);
    }
    CHECK(!arena.can_make_room(large));
    // Every other record is in use, the others go.
    int asked = 0;
    const auto is_movable = [&](EntryNumber owner) {
        ++asked;
        return owner % 2 == 0;
    };
    int plans = 0;
    for (std::size_t i = 0; i < slots.size(); i += 2) {
        arena.free(slots[i]);
        if (arena.can_make_room(large)) {
            CHECK(!arena.plan_room(large, is_movable));
            CHECK(!arena.can_make_room(large));
            ++plans;
        }
    }
    CHECK(plans > 4 && plans <= 22);
    CHECK(asked < 100 * plans);
    CHECK(!arena.allocate(large, 1));

    // Once they are released there is a way, though none of it is free yet.
    int rounds = 0;
    while (!arena.allocate(large, 1)) {
        const auto plan = arena.plan_room(large, [](EntryNumber) { return true; });
        CHECK(plan && !plan->moves.empty() && plan->bytes <= 64 * kMiB);
        for (const Move& move : plan->moves) {
            arena.finish_move(move);
        }
        CHECK(++rounds < 4);
    }
    CHECK(arena.stats().moved_bytes > 0);
    CHECK(arena.plan_room(small, is_movable)->moves.empty());  // it has holes
}

// Memory that was free when a plan was refused does not count once others have taken it.
TEST(a_plan_is_tried_again_when_more_is_free_than_the_least_since_it_was_refused) {
    constexpr std::uint64_t kRecord = 64 * kKiB;
    Arena arena = make_arena({64 * kMiB, kMiB}, 16);
    const ClassNumber small = arena.class_for(kRecord).value();
    const ClassNumber large = arena.class_for(24 * kMiB).value();
    std::vector<Slot> slots;
    while (const auto slot = arena.allocate(small, static_cast<EntryNumber>(slots.size()))) {
        slots.push_back(*slot);
    }
    // Every other one goes, and nothing can be moved.
    std::size_t freed = 0;
    const auto free_bytes = [&](std::uint64_t bytes) {
        for (; bytes != 0; bytes -= kRecord, freed += 2) {
            arena.free(slots[freed]);
        }
    };
    free_bytes(128 * kMiB);
    CHECK(arena.can_make_room(large));
    CHECK(!arena.plan_room(large, [](EntryNumber) { return false; }));
    CHECK(!arena.can_make_room(large));
    for (std::uint64_t taken = 0; taken < 32 * kMiB; taken += kRecord) {
        CHECK(arena.allocate(small, 1).has_value());
    }
    CHECK(!arena.allocate(large, 1));
    CHECK(!arena.can_make_room(large));
    free_bytes(3 * kMiB - kRecord);
    CHECK(!arena.can_make_room(large));
    free_bytes(kRecord);
    CHECK(arena.can_make_room(large));
    CHECK(!arena.plan_room(large, [](EntryNumber) { return false; }));
    CHECK(!arena.can_make_room(large));
}

TEST(a_full_pool_of_one_size_does_not_plan_for_each_record) {
    constexpr std::uint64_t kRecord = 5 * kMiB;
    Arena arena = make_arena({64 * kMiB, kMiB}, 512);  // 4 extents of each segment are left over
    const ClassNumber number = arena.class_for(kRecord).value();
    std::vector<Slot> slots;
    while (const auto slot = arena.allocate(number, static_cast<EntryNumber>(slots.size()))) {
        slots.push_back(*slot);
    }
    int plans = 0;
    for (const Slot slot : slots) {
        // Does as a store does: no slot is free, an entry is evicted, and a new one takes its place.
        if (arena.can_make_room(number)) {
            CHECK(!arena.plan_room(number, [](EntryNumber) { return true; }));
            ++plans;
        }
        arena.free(slot);
        CHECK(arena.allocate(number, slot.span).has_value());
    }
    // Now and then, as records that were in the way may be gone: 512 extents are freed between two looks at 32,768.
    CHECK(plans > 30);
    CHECK(plans <= static_cast<int>(slots.size()) / 60);
}

TEST(records_lie_in_what_is_there_and_more_can_come) {
    Arena arena = make_arena({64 * kMiB, kMiB}, 0);
    CHECK(arena.reserve(1ull << 20).ok());
    CHECK(arena.reserve((1ull << 31) + 1).code() == Code::invalid);
    const ClassNumber number = arena.class_for(3 * kMiB).value();
    CHECK(!arena.allocate(number, 1));
    std::size_t count = 0;
    for (std::uint64_t extents = 0; extents < 128; extents += 16) {
        CHECK(arena.add_extents(16).ok());
        CHECK_EQUAL(arena.stats().capacity_bytes, (extents + 16) * kMiB);
        while (const auto slot = arena.allocate(number, static_cast<EntryNumber>(count))) {
            const SlotPlace place = arena.place(*slot);
            CHECK(place.segment * 64 * kMiB + place.offset_bytes + 3 * kMiB <= (extents + 16) * kMiB);
            ++count;
        }
    }
    CHECK(count >= 40 && records_of(arena).size() == count);
}

TEST(a_record_size_without_records_makes_place_for_another) {
    Arena arena = value_of(Arena::create({.segment_bytes = 64 << 20, .extent_bytes = 16 << 10}));
    CHECK(arena.add_segment().ok());
    // Many more sizes than are served, each with a record for a while.
    for (std::uint64_t size = 1; size <= 10'000; ++size) {
        const ClassNumber number = value_of(arena.class_for(size * 8));
        const auto slot = arena.allocate(number, static_cast<EntryNumber>(size));
        CHECK(slot.has_value());
        CHECK_EQUAL(arena.size_class(number).record_bytes, size * 8);
        arena.free(*slot);
    }
    CHECK_EQUAL(arena.class_count(), 4096u);
    CHECK_EQUAL(arena.stats().free_extents, 4096u);
}

TEST(more_record_sizes_than_are_served_are_refused_as_long_as_all_have_records) {
    Arena arena = value_of(Arena::create({.segment_bytes = 64 << 20, .extent_bytes = 16 << 10}));
    for (int i = 0; i < 8; ++i) {
        CHECK(arena.add_segment().ok());
    }
    std::vector<Slot> slots;
    for (std::uint64_t size = 1; size <= 4096; ++size) {
        const auto slot = arena.allocate(value_of(arena.class_for(size)), static_cast<EntryNumber>(size));
        CHECK(slot.has_value());
        slots.push_back(*slot);
    }
    CHECK(arena.class_for(5000).fault().code() == Code::unavailable);
    const ClassNumber seven = value_of(arena.class_for(7));
    arena.free(slots[6]);
    CHECK_EQUAL(value_of(arena.class_for(5000)), seven);
    CHECK(arena.allocate(seven, 1).has_value());
    CHECK(arena.class_for(7).fault().code() == Code::unavailable);
    CHECK_EQUAL(arena.owner_at(slots[7]), 8u);
}

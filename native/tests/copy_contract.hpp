// The contract of every copy engine, checked against copies made one byte after the other. Written once, run on each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "check.hpp"
#include "copy/copy_engine.hpp"
#include "copy/copy_plan.hpp"
#include "digest/digest.hpp"

namespace kvo::test {

using CopyBytes = std::vector<std::uint8_t>;

inline constexpr int kCopyTimeoutMs = 60'000;

// The memory that an engine works on, which may be a device's, and the engine itself.
class CopyGround {
public:
    virtual ~CopyGround() = default;

    // One piece of each, which stays where it is as long as the ground does.
    virtual std::uint64_t make_pages(std::size_t size_bytes) = 0;
    virtual std::uint64_t make_slots(std::size_t size_bytes) = 0;

    virtual void write_pages(const CopyBytes& bytes) = 0;
    virtual void write_slots(const CopyBytes& bytes) = 0;
    virtual CopyBytes read_pages() = 0;
    virtual CopyBytes read_slots() = 0;

    virtual std::unique_ptr<CopyEngine> open(PageTable pages, CopyLimits limits) = 0;
};

using MakeGround = std::function<std::unique_ptr<CopyGround>()>;

// ---- random pages and plans ----

// Addresses count from 0 until the pages have been made. Bytes between runs and blocks are unused.
struct CopyLayout {
    PageTable table;
    std::size_t page_bytes = 0;
    std::size_t slot_bytes = 0;
};

inline std::uint64_t draw_length(std::mt19937_64& random) {
    constexpr std::uint64_t kMost[] = {4, 100, 300, 5'000, 20'000};
    return 1 + random() % kMost[random() % std::size(kMost)];
}

// Runs one layer after the other: each with all its blocks, with or without padding, touching the next or not.
inline void lay_by_layer(GroupPages& group, CopyLayout& layout, std::mt19937_64& random) {
    for (PageRun& run : group.runs) {
        layout.page_bytes += random() % 3 * (random() % 80);
        run.base = layout.page_bytes;
        run.stride = run.length + random() % 2 * (random() % 70);
        layout.page_bytes += run.stride * layout.table.block_count;
    }
}

// Blocks outermost: the runs of a block follow each other, some of them without a gap.
inline void lay_by_block(GroupPages& group, CopyLayout& layout, std::mt19937_64& random) {
    std::uint64_t at = layout.page_bytes + random() % 100;
    const std::uint64_t first = at;
    for (PageRun& run : group.runs) {
        run.base = at;
        at += run.length + random() % 2 * (random() % 50);
    }
    const std::uint64_t stride = at - first;
    for (PageRun& run : group.runs) {
        run.stride = stride;
    }
    layout.page_bytes = first + stride * layout.table.block_count;
}

inline CopyLayout draw_layout(std::mt19937_64& random) {
    CopyLayout layout;
    layout.table.block_count = 1 + random() % 12;
    layout.table.groups.resize(1 + random() % 3);
    std::uint64_t largest = 0;
    for (GroupPages& group : layout.table.groups) {
        group.runs.resize(random() % 8 == 0 ? 0 : 1 + random() % 9);
        for (PageRun& run : group.runs) {
            run.length = draw_length(random);
            run.record_offset = group.record_bytes;
            group.record_bytes += run.length;
        }
        random() % 2 == 0 ? lay_by_layer(group, layout, random) : lay_by_block(group, layout, random);
        largest = std::max(largest, group.record_bytes);
    }
    layout.page_bytes += 64;
    layout.slot_bytes = 2 * layout.table.block_count * layout.table.groups.size() * (largest + 16) + 64;
    return layout;
}

// Any of the blocks, each once, to or from slots that follow each other, with or without gaps, at any address; in the
// order of the blocks or in none.
inline CopyPlan draw_plan(const PageTable& table, std::uint64_t slots, std::size_t slot_bytes,
                          std::mt19937_64& random) {
    CopyPlan plan;
    plan.direction = random() % 2 == 0 ? CopyDirection::save : CopyDirection::load;
    plan.has_digests = random() % 2 == 0;
    for (std::uint32_t group = 0; group < table.groups.size(); ++group) {
        for (std::uint32_t block = 0; block < table.block_count; ++block) {
            if (random() % 3 != 0) {
                plan.items.push_back({group, block, 0});
            }
        }
    }
    if (random() % 2 == 0) {
        std::ranges::shuffle(plan.items, random);
    }
    const bool has_gaps = random() % 2 == 0;
    std::uint64_t at = 1 + random() % (slot_bytes / 2);
    for (CopyItem& item : plan.items) {
        item.slot = slots + at;
        at += table.groups[item.group].record_bytes + (has_gaps ? random() % 16 : 0);
    }
    return plan;
}

// ---- one engine on its ground, and what its memory should hold ----

class CopyTrial {
public:
    CopyTrial(const MakeGround& make, CopyLayout layout, std::mt19937_64& random, CopyLimits limits = {})
        : ground_(make()), layout_(std::move(layout)), random_(random) {
        pages_at_ = ground_->make_pages(layout_.page_bytes);
        slots_at_ = ground_->make_slots(layout_.slot_bytes);
        for (GroupPages& group : layout_.table.groups) {
            for (PageRun& run : group.runs) {
                run.base += pages_at_;
            }
        }
        pages_.resize(layout_.page_bytes);
        slots_.resize(layout_.slot_bytes);
        fill();
        engine_ = ground_->open(layout_.table, limits);
    }

    // Submits a plan to the engine, and carries it out slowly on the expected bytes at once.
    CopyTicket submit(const CopyPlan& plan) {
        const Result<CopyTicket> ticket = engine_->submit(plan, {});
        CHECK(ticket.ok());
        copy_slowly(plan);
        return ticket.value();
    }

    CopyPlan draw() { return draw_plan(layout_.table, slots_at_, layout_.slot_bytes, random_); }

    // Everything submitted has ended well; every byte is as it should be, and so is every digest.
    void check_all() {
        CHECK(engine_->fence(kCopyTimeoutMs));
        for (const FinishedCopy& finished : engine_->poll()) {
            CHECK(finished.status.ok());
            const auto expected = expected_.find(finished.ticket);
            CHECK(expected != expected_.end());
            CHECK(finished.digests == expected->second);
            expected_.erase(expected);
        }
        CHECK(expected_.empty());
        check_memory();
    }

    void check_memory() {
        CHECK(ground_->read_pages() == pages_);
        CHECK(ground_->read_slots() == slots_);
    }

    // New random bytes everywhere.
    void fill() {
        std::ranges::generate(pages_, [&] { return static_cast<std::uint8_t>(random_()); });
        std::ranges::generate(slots_, [&] { return static_cast<std::uint8_t>(random_()); });
        ground_->write_pages(pages_);
        ground_->write_slots(slots_);
    }

    CopyEngine& engine() { return *engine_; }
    const PageTable& table() const { return layout_.table; }
    std::uint64_t slots_at() const { return slots_at_; }

private:
    void copy_slowly(const CopyPlan& plan) {
        std::vector<RunDigest> digests;
        for (const CopyItem& item : plan.items) {
            const GroupPages& group = layout_.table.groups[item.group];
            const std::span record(slots_.data() + (item.slot - slots_at_), group.record_bytes);
            for (const PageRun& run : group.runs) {
                std::uint8_t* const page = pages_.data() + (run.base + item.block * run.stride - pages_at_);
                for (std::uint64_t i = 0; i < run.length; ++i) {
                    std::uint8_t& in_slot = record[run.record_offset + i];
                    plan.direction == CopyDirection::save ? in_slot = page[i] : page[i] = in_slot;
                }
            }
            digests.push_back(digest_run(record, 0));
        }
        expected_[next_ticket_++] = plan.has_digests ? digests : std::vector<RunDigest>();
    }

    std::unique_ptr<CopyGround> ground_;
    CopyLayout layout_;
    std::mt19937_64& random_;
    std::uint64_t pages_at_ = 0, slots_at_ = 0;
    CopyBytes pages_, slots_;
    std::map<CopyTicket, std::vector<RunDigest>> expected_;
    CopyTicket next_ticket_ = 1;
    std::unique_ptr<CopyEngine> engine_;  // goes before the ground
};

// ---- the contract ----

inline void check_every_byte(const MakeGround& make, int rounds) {
    std::mt19937_64 random(60);
    for (int round = 0; round < rounds; ++round) {
        CopyTrial trial(make, draw_layout(random), random);
        for (int plan = 0; plan < 4; ++plan) {
            trial.submit(trial.draw());
            trial.check_all();
        }
    }
}

// Plans that share blocks and slots, all under way at once: the bytes are those of one after the other.
inline void check_order(const MakeGround& make, int rounds) {
    std::mt19937_64 random(61);
    for (int round = 0; round < rounds; ++round) {
        CopyTrial trial(make, draw_layout(random), random);
        for (int plan = 0; plan < 24; ++plan) {
            trial.submit(trial.draw());
        }
        trial.check_all();
    }
}

inline void check_tickets(const MakeGround& make) {
    std::mt19937_64 random(62);
    CopyTrial trial(make, draw_layout(random), random);
    CopyEngine& engine = trial.engine();
    CHECK(engine.fence(0));
    CHECK(engine.poll().empty());
    for (CopyTicket expected = 1; expected <= 5; ++expected) {
        CHECK_EQUAL(trial.submit(expected == 3 ? CopyPlan{} : trial.draw()), expected);
    }
    CHECK(engine.fence(kCopyTimeoutMs));
    std::vector<CopyTicket> told;
    for (const FinishedCopy& finished : engine.poll()) {
        told.push_back(finished.ticket);
    }
    std::ranges::sort(told);
    CHECK(told == std::vector<CopyTicket>({1, 2, 3, 4, 5}));
    CHECK(engine.poll().empty());
}

inline void check_refusals(const MakeGround& make) {
    std::mt19937_64 random(63);
    CopyLayout layout;
    layout.table = {.block_count = 4, .groups = {{.record_bytes = 8, .runs = {{0, 8, 8, 0}}}}};
    layout.page_bytes = layout.slot_bytes = 64;
    CopyTrial trial(make, layout, random);
    const std::uint64_t slot = trial.slots_at();
    const std::vector<CopyPlan> wrong = {
        {CopyDirection::save, false, {{1, 0, slot}}},
        {CopyDirection::save, false, {{0, 4, slot}}},
        {CopyDirection::save, false, {{0, 0, 0}}},
        {CopyDirection::load, false, {{0, 2, slot}, {0, 1, slot + 8}, {0, 2, slot + 16}}},
    };
    for (const CopyPlan& plan : wrong) {
        const Result<CopyTicket> refused = trial.engine().submit(plan, {});
        CHECK(!refused.ok());
        CHECK(refused.fault().code() == Code::invalid);
        CHECK(!refused.fault().message().empty());
    }
    CHECK(trial.engine().poll().empty());
    CHECK_EQUAL(trial.submit({CopyDirection::load, true, {{0, 2, slot}, {0, 1, slot + 8}}}), CopyTicket{1});
    trial.check_all();
}

// A plan counts until it has been polled, so what a caller forgets is bounded too.
inline void check_limits(const MakeGround& make) {
    std::mt19937_64 random(64);
    CopyTrial trial(make, draw_layout(random), random, CopyLimits{.plans = 3});
    for (int round = 0; round < 3; ++round) {
        for (int plan = 0; plan < 3; ++plan) {
            trial.submit(trial.draw());
        }
        CHECK(trial.engine().fence(kCopyTimeoutMs));
        const Result<CopyTicket> refused = trial.engine().submit({}, {});
        CHECK(!refused.ok());
        CHECK(refused.fault().code() == Code::unavailable);
        trial.check_all();
    }
}

// With or without plans under way: each is told, none touches memory any more, and none is taken.
inline void check_close(const MakeGround& make, int rounds) {
    std::mt19937_64 random(65);
    for (int round = 0; round < rounds; ++round) {
        CopyTrial trial(make, draw_layout(random), random);
        std::size_t open = random() % 20;
        for (std::size_t plan = 0; plan < open; ++plan) {
            trial.submit(trial.draw());
        }
        CHECK(trial.engine().close(kCopyTimeoutMs).ok());
        trial.fill();
        const Result<CopyTicket> refused = trial.engine().submit({}, {});
        CHECK(!refused.ok());
        CHECK(refused.fault().code() == Code::unavailable);
        CHECK(trial.engine().fence(0));
        for (const FinishedCopy& finished : trial.engine().poll()) {
            CHECK(finished.status.ok() || !finished.status.message().empty());
            --open;
        }
        CHECK_EQUAL(open, std::size_t{0});
        trial.check_memory();
    }
}

}  // namespace kvo::test

#include "copy/host_copy.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "copy_contract.hpp"
#include "shim/cpu_features.hpp"

using namespace kvo;

namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(std::size_t size, std::mt19937_64& random) {
    Bytes bytes(size);
    std::ranges::generate(bytes, [&] { return static_cast<std::uint8_t>(random()); });
    return bytes;
}

}  // namespace

TEST(the_path_is_what_the_machine_has) {
    CHECK_EQUAL(std::string(stream_paths().back().name), "portable");
    const bool has_avx512 = cpu_features().has(CpuFeature::avx512f);
    CHECK_EQUAL(std::string(stream_path().name) == "avx512", has_avx512);
}

TEST(all_paths_copy_every_length_and_address_and_no_byte_more) {
    std::mt19937_64 random(71);
    const Bytes source = random_bytes(12'000, random);
    for (std::size_t round = 0; round < 1200; ++round) {
        const std::size_t length = round < 400 ? round : random() % 9000;
        const std::size_t from = random() % 70, at = random() % 140, offset = random() % 9000;
        const auto run = std::span(source).subspan(from, length);
        for (const StreamPath& path : stream_paths()) {
            for (const bool has_digest : {false, true}) {
                Bytes expected(length + 200, 0x5a);
                Bytes target = expected;
                std::ranges::copy(run, expected.begin() + static_cast<std::ptrdiff_t>(at));
                if (has_digest) {
                    CHECK(stream_with_digest(target.data() + at, run, offset, path) == digest_run(run, offset));
                } else {
                    stream_copy(target.data() + at, run, path);
                }
                stream_fence();
                CHECK(target == expected);
            }
        }
    }
}

using namespace kvo::test;

namespace {

struct Memory {
    CopyBytes pages, slots;
    PageTable table;
    CopyPlan plan;
};

std::uint64_t address(const CopyBytes& bytes) { return reinterpret_cast<std::uint64_t>(bytes.data()); }

// `count` blocks in 70 runs of `length`, which is more than are looked ahead to at once; slots in another order.
Memory make_memory(std::uint32_t count, std::uint64_t length, CopyDirection direction, bool has_digests,
                   std::mt19937_64& random) {
    constexpr std::uint64_t kRuns = 70;
    Memory memory{.pages = CopyBytes(count * kRuns * length),
                  .slots = CopyBytes(count * kRuns * length + 1),
                  .table = {},
                  .plan = {}};
    std::ranges::generate(memory.pages, [&] { return static_cast<std::uint8_t>(random()); });
    std::ranges::generate(memory.slots, [&] { return static_cast<std::uint8_t>(random()); });
    GroupPages group{.record_bytes = kRuns * length, .runs = {}};
    for (std::uint64_t run = 0; run < kRuns; ++run) {
        group.runs.push_back({address(memory.pages) + run * count * length, length, length, run * length});
    }
    memory.table = {.block_count = count, .groups = {group}};
    memory.plan = {direction, has_digests, {}};
    for (std::uint32_t block = 0; block < count; ++block) {
        const std::uint64_t slot = count - 1 - block;
        memory.plan.items.push_back({0, block, address(memory.slots) + 1 + slot * group.record_bytes});
    }
    return memory;
}

bool is_copied(const Memory& memory) {
    for (const CopyItem& item : memory.plan.items) {
        for (const PageRun& run : memory.table.groups[0].runs) {
            const auto* const page = reinterpret_cast<const std::uint8_t*>(run.base + item.block * run.stride);
            const auto* const slot = reinterpret_cast<const std::uint8_t*>(item.slot + run.record_offset);
            if (!std::equal(page, page + run.length, slot)) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace

// Below and above what goes around the caches, with runs too short for that and long enough.
TEST(pieces_copy_their_bytes_and_digest_them) {
    std::mt19937_64 random(72);
    for (const std::uint64_t length : {std::uint64_t{40}, std::uint64_t{1024}, std::uint64_t{8200}}) {
        for (const std::uint32_t count : {1U, 5U}) {
            for (const auto direction : {CopyDirection::save, CopyDirection::load}) {
                for (const bool has_digests : {false, true}) {
                    const Memory memory = make_memory(count, length, direction, has_digests, random);
                    const RunList runs(memory.plan, memory.table);
                    std::map<std::uint32_t, RunDigest> digests;
                    const std::uint64_t cut = runs.total_bytes() / 3;
                    const auto take = [&](std::uint32_t item, const RunDigest& digest) {
                        digests[item] = combine(digests[item], digest);
                    };
                    copy_piece(memory.plan, runs, cut, runs.total_bytes(), take);
                    copy_piece(memory.plan, runs, 0, cut, take);
                    CHECK(is_copied(memory));
                    CHECK_EQUAL(digests.size(), has_digests ? memory.plan.items.size() : 0);
                    for (const auto& [item, digest] : digests) {
                        const auto* const slot = reinterpret_cast<const std::uint8_t*>(memory.plan.items[item].slot);
                        CHECK(digest == digest_run({slot, memory.table.groups[0].record_bytes}, 0));
                    }
                }
            }
        }
    }
}

TEST(a_piece_touches_nothing_outside_itself) {
    std::mt19937_64 random(73);
    Memory memory = make_memory(3, 50, CopyDirection::save, false, random);
    const RunList runs(memory.plan, memory.table);
    const CopyBytes before = memory.slots;
    copy_piece(memory.plan, runs, 100, 100, {});
    CHECK(memory.slots == before);
    copy_piece(memory.plan, runs, 3501, 3502, {});
    std::size_t changed = 0;
    for (std::size_t i = 0; i < before.size(); ++i) {
        changed += memory.slots[i] != before[i] ? 1U : 0U;
    }
    CHECK_EQUAL(changed, std::size_t{1});
}

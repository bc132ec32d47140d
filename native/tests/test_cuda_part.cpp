#include "copy/cuda_part.hpp"

#include <array>
#include <map>
#include <random>

#include "check.hpp"

using namespace kvo;

namespace {

constexpr PartBuffers kBuffers = {.staging = 1'000'000, .bounce = 2'000'000, .bounce_mapped = 3'000'000};
constexpr std::uint64_t kMappedOffset = 10'000'000;  // from a slot's address to the device's

// Where the host's side of an entry lies: a slot, or a position in the bounce buffer.
std::uint64_t slot_of(const CopyPart& part, CopyWay way, std::uint64_t other,
                      const std::map<std::uint64_t, std::uint64_t>& slot_at) {
    if (part.is_bounced) {
        const std::uint64_t bounce = way == CopyWay::mapped ? kBuffers.bounce_mapped : kBuffers.bounce;
        return slot_at.at(part.begin + (other - bounce));
    }
    return way == CopyWay::mapped ? other - kMappedOffset : other;
}

}  // namespace

// Random pages, plans, limits and registered pieces: the parts carry each byte between its page and its slot once, and
// no copy leaves its piece or its buffer.
TEST(the_parts_of_a_plan_carry_each_byte_once) {
    std::mt19937_64 random(17);
    for (int round = 0; round < 600; ++round) {
        PageTable pages{.block_count = 5, .groups = {{}}};
        GroupPages& group = pages.groups[0];
        for (std::uint64_t run = 0; run < 1 + random() % 4; ++run) {
            const std::uint64_t length = 1 + random() % 30;
            group.runs.push_back({10'000 + run * 1000, length + random() % 2 * 10, length, group.record_bytes});
            group.record_bytes += length;
        }
        CopyPlan plan;
        for (std::uint64_t block = 0, slot = 500; block < 5; ++block) {
            plan.items.push_back({0, static_cast<std::uint32_t>(block), slot});
            slot += group.record_bytes + random() % 2 * 13;
        }
        HostPieces pieces;
        for (std::uint64_t at = 480; at < 1200;) {
            const std::uint64_t length = 1 + random() % 200;
            if (random() % 3 != 0) {
                pieces.push_back({at, at + length, at + kMappedOffset});
            }
            at += length;
        }
        const RunList runs(plan, pages);
        std::map<std::uint64_t, std::uint64_t> slot_at, page_at;  // by position
        runs.visit_runs(0, runs.total_bytes(), [&](const CopyRun& run) {
            for (std::uint64_t i = 0; i < run.length; ++i) {
                slot_at[run.position + i] = run.slot + i;
                page_at[run.position + i] = run.page + i;
            }
        });
        const CopyWay way = std::array{CopyWay::batch, CopyWay::staged, CopyWay::mapped}[random() % 3];
        const PartLimits limits{1 + random() % 100, 1 + random() % 6};
        std::uint64_t at = 0;
        while (at < runs.total_bytes()) {
            const CopyPart part = cut_part(runs, at, way, limits, pieces, kBuffers);
            CHECK_EQUAL(part.begin, at);
            CHECK(part.end > at && part.end - at <= limits.bytes);
            CHECK((way == CopyWay::batch ? part.transfers : part.kernel).size() <= limits.entries);
            CHECK_EQUAL(part.kernel.empty(), way == CopyWay::batch);
            CHECK_EQUAL(part.transfers.empty(), way == CopyWay::mapped);
            // Page to staging, then staging to slot; or at once.
            std::map<std::uint64_t, std::uint64_t> staged_page, slot_page;
            for (const PartEntry& entry : part.kernel) {
                for (std::uint64_t i = 0; i < entry.length; ++i) {
                    (way == CopyWay::staged ? staged_page[entry.other + i]
                                            : slot_page[slot_of(part, way, entry.other + i, slot_at)]) =
                        entry.device + i;
                }
            }
            for (const PartEntry& entry : part.transfers) {
                if (!part.is_bounced) {
                    const HostSpan span = span_at(pieces, entry.other, entry.length);
                    CHECK(span.is_registered && span.length == entry.length);
                }
                for (std::uint64_t i = 0; i < entry.length; ++i) {
                    slot_page[slot_of(part, way, entry.other + i, slot_at)] =
                        way == CopyWay::staged ? staged_page.at(entry.device + i) : entry.device + i;
                }
            }
            CHECK_EQUAL(slot_page.size(), part.end - part.begin);
            for (; at < part.end; ++at) {
                CHECK_EQUAL(slot_page.at(slot_at.at(at)), page_at.at(at));
                CHECK_EQUAL(span_at(pieces, slot_at.at(at), 1).is_registered, !part.is_bounced);
            }
        }
    }
}

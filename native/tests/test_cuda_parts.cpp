#include "copy/cuda_parts.hpp"

#include <array>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"

using namespace kvo;

// Lists come and go in order; no two that are there at once share a byte, and none goes over the end.
TEST(lists_never_lie_on_each_other) {
    struct List {
        std::uint64_t begin, end;
    };
    std::mt19937_64 random(5);
    for (int round = 0; round < 50; ++round) {
        ListRing ring{.size_bytes = 100 + random() % 300};
        std::vector<int> owner(ring.size_bytes, 0);
        std::deque<List> lists;
        std::uint64_t found = 0;
        for (int step = 0; step < 500; ++step) {
            const std::uint64_t bytes = 1 + random() % (ring.size_bytes / 2);
            if (const auto begin = ring.find_room(bytes)) {
                CHECK(ring.offset_of(*begin) + bytes <= ring.size_bytes);
                for (std::uint64_t at = *begin; at < *begin + bytes; ++at) {
                    CHECK_EQUAL(owner[ring.offset_of(at)]++, 0);
                }
                ring.head = *begin + bytes;
                lists.push_back({*begin, ring.head});
                ++found;
            } else {
                CHECK(!lists.empty());
            }
            if (!lists.empty() && random() % 2 == 0) {
                for (std::uint64_t at = lists.front().begin; at < lists.front().end; ++at) {
                    --owner[ring.offset_of(at)];
                }
                ring.tail = lists.front().end;
                lists.pop_front();
            }
        }
        CHECK(found > 100);
    }
}

TEST(a_ring_that_is_full_says_so) {
    ListRing ring{.size_bytes = 100};
    CHECK_EQUAL(ring.find_room(60).value(), 0u);
    ring.head = 60;
    CHECK(!ring.find_room(50));
    CHECK_EQUAL(ring.find_room(40).value(), 60u);
    ring.tail = 60;
    CHECK_EQUAL(ring.find_room(50).value(), 100u);
}

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

namespace {

// Rings, queues and buffers are counted; nothing here is called by its address.
struct Scene {
    explicit Scene(std::size_t places = 3) : parts(settings) {
        parts.open(std::vector<CudaPlace>(places), {{host.data(), 0x1000}, {host.data() + 8, 0x1008}},
                   {{0x2000}, {0x3000}});
    }
    CudaPlace& begin(CopyWay way, bool is_bounced = false, std::size_t entries = 1) {
        const std::optional<CudaPartRoom> room = parts.find_room(way, is_bounced);
        CHECK(room.has_value());
        CopyPart part;
        part.end = 100;
        (way == CopyWay::batch ? part.transfers : part.kernel).resize(entries);
        CudaPlace& place = parts.begin(job, part, *room, nullptr);
        parts.keep_staging(place);
        return place;
    }

    CudaSettings settings = [] {
        CudaSettings chosen;
        chosen.kernel_entries = 4;
        chosen.list_bytes = 10 * kListEntryBytes;
        chosen.batch_entries = 5;
        chosen.queued_transfers = 12;
        return chosen;
    }();
    std::array<std::uint8_t, 16> host{};
    CudaJob job;
    CudaParts parts;
};

}  // namespace

TEST(parts_end_in_the_order_in_which_they_began) {
    Scene scene;
    CudaPlace& first = scene.begin(CopyWay::batch);
    CudaPlace& second = scene.begin(CopyWay::batch);
    scene.begin(CopyWay::batch);
    CHECK_EQUAL(scene.job.part_count, std::size_t{3});
    CHECK(!scene.parts.find_room(CopyWay::batch, false));  // every place is used
    CHECK(&scene.parts.oldest() == &first);
    scene.parts.retire();
    CHECK(&scene.parts.oldest() == &second);
    CHECK(&scene.begin(CopyWay::batch) == &first);
    for (int i = 0; i < 3; ++i) {
        CHECK(!scene.parts.is_empty());
        scene.parts.retire();
    }
    CHECK(scene.parts.is_empty());
    CHECK_EQUAL(scene.job.part_count, std::size_t{0});
}

TEST(a_bounce_buffer_is_one_parts_until_that_has_ended) {
    Scene scene;
    const CudaPlace& first = scene.begin(CopyWay::batch, true);
    const CudaPlace& second = scene.begin(CopyWay::batch, true);
    CHECK(first.bounce != second.bounce);
    CHECK(!scene.parts.find_room(CopyWay::batch, true));
    CHECK(scene.parts.find_room(CopyWay::batch, false).has_value());
    CudaBounce* const bounce = first.bounce;
    scene.parts.retire();
    const std::optional<CudaPartRoom> room = scene.parts.find_room(CopyWay::batch, true);
    CHECK(room && room->bounce == bounce);
    CHECK_EQUAL(room->buffers().bounce_mapped, bounce->mapped);
    CHECK(room->has_buffer());
}

TEST(a_staging_buffer_knows_the_part_that_used_it_last_until_that_has_ended) {
    Scene scene;
    const CudaPlace& first = scene.begin(CopyWay::staged);
    CHECK_EQUAL(scene.parts.find_room(CopyWay::staged, false)->buffers().staging, CudaAddress{0x3000});
    scene.begin(CopyWay::staged);
    const std::optional<CudaPartRoom> third = scene.parts.find_room(CopyWay::staged, false);
    CHECK_EQUAL(third->buffers().staging, CudaAddress{0x2000});
    CHECK(third->staging->last == &first);
    scene.parts.retire();
    CHECK(third->staging->last == nullptr);
    CHECK(scene.parts.find_room(CopyWay::mapped, false)->staging == nullptr);
}

TEST(a_buffer_whose_part_was_refused_is_the_next_one_s) {
    Scene scene;
    const std::optional<CudaPartRoom> room = scene.parts.find_room(CopyWay::staged, false);
    scene.parts.begin(scene.job, {}, *room, nullptr);  // the driver did not take it
    CHECK(scene.parts.find_room(CopyWay::staged, false)->staging == room->staging);
    CHECK(room->staging->last == nullptr);
    scene.parts.retire();
    CHECK(scene.parts.is_empty());
}

TEST(lists_of_runs_lie_in_one_piece_and_wait_for_room) {
    Scene scene(8);
    CHECK_EQUAL(scene.begin(CopyWay::mapped, false, 4).lists_offset, std::uint64_t{0});
    CHECK_EQUAL(scene.begin(CopyWay::mapped, false, 4).lists_offset, 4 * kListEntryBytes);
    CHECK(!scene.parts.find_room(CopyWay::mapped, false));  // 2 entries are left, and then it begins anew
    CHECK(scene.parts.find_room(CopyWay::batch, false).has_value());
    scene.parts.retire();
    CHECK_EQUAL(scene.begin(CopyWay::mapped, false, 3).lists_offset, std::uint64_t{0});
}

TEST(transfers_are_held_back_while_the_driver_s_queue_is_full) {
    Scene scene(8);
    scene.begin(CopyWay::batch, false, 5);
    scene.begin(CopyWay::batch, false, 5);
    CHECK(!scene.parts.find_room(CopyWay::batch, false));  // 5 more would be 15 of 12
    scene.parts.retire();
    CHECK(scene.parts.find_room(CopyWay::batch, false).has_value());
}

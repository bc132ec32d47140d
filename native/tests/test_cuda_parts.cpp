#include "copy/cuda_parts.hpp"

#include <array>
#include <utility>
#include <vector>

#include "check.hpp"

using namespace kvo;

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

#include "disk/open_segments.hpp"

#include <optional>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

constexpr std::size_t kLength = 400 << 10;  // two of them fill a segment

struct Scene {
    explicit Scene(const std::string& name) : folder("open_segments_" + name) {
        CHECK_EQUAL(chmod(folder.root().c_str(), 0700), 0);
        terms = small_terms(folder.root().string());
        terms.capacity_bytes = 4 * kSmallSegment;
        files.emplace(terms, counts);
        CHECK(files->open().ok());
        condition.emplace(terms);
        condition->set(DeviceState::ready, {});
        Result<MadeEngine> made = make_io_engine("auto", terms.io_depth);
        CHECK(made.ok());
        runner.emplace(std::make_unique<FaultyIo>(std::move(made.value().engine), plan), terms.write_depth);
        Result<AlignedMemory> memory = AlignedMemory::create(32 * terms.write_buffer_bytes);
        CHECK(memory.ok());
        open.emplace(OpenSeat{.terms = terms,
                              .runner = *runner,
                              .files = *files,
                              .index = index,
                              .counts = counts,
                              .condition = *condition},
                     std::move(memory.value()));
    }
    ~Scene() { CHECK(runner->close(10000)); }

    Records append(std::uint64_t number, bool wants_durable, bool is_move = false) {
        Records records = make_records(DiskVerb::put, {number}, kLength, wants_durable);
        records.batch->is_move = is_move;
        CHECK(open->make_room(kLength, is_move));
        CHECK(open->append(records.batch, 0, {}));
        return records;
    }
    template <typename Condition>
    void run_until(Condition condition_is) {
        const Instant end = soon();
        while (!condition_is()) {
            CHECK(std::chrono::steady_clock::now() < end);
            open->maintain(terms.now());
            if (runner->poll(terms.now()) == 0) {
                wait_readable(runner->queue().file(), 1);
            }
        }
    }

    MadeUpFiles folder;
    DeviceTerms terms;
    DeviceCounts counts;
    SharedIndex index{4};
    std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
    std::optional<SegmentFiles> files;
    std::optional<DeviceCondition> condition;
    std::optional<IoRunner> runner;
    std::optional<OpenSegments> open;
};

}  // namespace

TEST(a_record_is_in_the_index_once_it_is_written) {
    Scene scene("index");
    const Records records = scene.append(1, true);
    const KeyMark mark = mark_of(key_of(1));
    CHECK(scene.open->has_appended(mark) && !scene.index.index.find(mark));
    scene.run_until([&] { return records.batch->has_ended(); });
    CHECK(records.are_all(DiskOutcome::durable));
    CHECK(!scene.open->has_appended(mark));
    const std::optional<RecordPlace> place = scene.index.index.find(mark);
    CHECK(place.has_value());
    CHECK_EQUAL(scene.open->entries(place->segment).size(), std::size_t{1});
    CHECK(scene.open->entries(place->segment + 1).empty());
}

TEST(a_full_segment_becomes_durable_while_another_is_written) {
    Scene scene("next");
    scene.append(1, false);
    scene.append(2, false);
    CHECK(scene.open->are_sealed());
    scene.append(3, false);
    CHECK(!scene.open->are_sealed());
    CHECK_EQUAL(scene.files->file_count(), std::uint64_t{2});
    scene.run_until([&] { return scene.open->are_sealed(); });
    CHECK(scene.files->has_any(SegmentState::full) && scene.files->has_any(SegmentState::writing));
}

TEST(the_last_empty_segment_is_for_moves) {
    Scene scene("moves");
    for (std::uint64_t number = 0; number < 6; ++number) {
        const Records records = scene.append(number, false);
        scene.run_until([&] { return records.batch->has_ended(); });
    }
    CHECK_EQUAL(scene.files->empty_count(), std::size_t{1});
    CHECK(!scene.open->make_room(kLength, false));
    CHECK(scene.open->make_room(kLength, true));
    CHECK(!scene.open->has_no_room());  // there is the segment that was begun
    scene.open->seal();
    CHECK(scene.open->has_no_room());
}

TEST(a_write_that_fails_is_noted_and_what_was_not_durable_is_out_of_the_index) {
    Scene scene("fails");
    const Records first = scene.append(1, true);
    scene.run_until([&] { return first.batch->has_ended(); });
    fail_kind(*scene.plan, IoKind::write, EIO);
    const Records second = scene.append(2, true);
    scene.run_until([&] { return second.batch->has_ended(); });
    CHECK(second.are_all(DiskOutcome::failed));
    CHECK(!scene.condition->is_writing());
    CHECK(scene.condition->take_write_problem().find(segment_file_name(0)) != std::string::npos);
    CHECK(scene.index.index.find(mark_of(key_of(1))) && !scene.index.index.find(mark_of(key_of(2))));
    scene.open->drop(DiskOutcome::failed);
    scene.run_until([&] { return scene.open->are_sealed(); });
}

TEST(a_record_that_is_there_ends_when_it_is_as_durable_as_is_wanted) {
    Scene scene("present");
    const Records written = scene.append(1, false);
    scene.run_until([&] { return written.batch->has_ended(); });
    const RecordPlace place = *scene.index.index.find(mark_of(key_of(1)));
    const Records plain = make_records(DiskVerb::put, {1}, kLength);
    scene.open->end_present(plain.batch, 0, place);
    CHECK(plain.are_all(DiskOutcome::written));
    const Records durable = make_records(DiskVerb::put, {1}, kLength, true);
    scene.open->end_present(durable.batch, 0, place);
    CHECK(!durable.batch->has_ended());
    scene.run_until([&] { return durable.batch->has_ended(); });
    CHECK(durable.are_all(DiskOutcome::durable));
}

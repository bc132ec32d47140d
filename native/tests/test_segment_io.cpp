#include "disk/segment_io.hpp"

#include <cerrno>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// A device has written a segment and left it without a footer.
struct Scene {
    explicit Scene(const std::string& name) : scene("segment_io_" + name) {
        scene.open();
        scene.put(range(0, 10), 20000);
        scene.drop();
        files.emplace(scene.terms, counts);
        CHECK(files->open().ok());
        CHECK(files->open_file(0).ok());
        runner.emplace(std::move(scene.terms.make_engine().value()), scene.terms.write_depth);
        io.emplace(scene.terms, *runner, *files, counts);
    }
    ~Scene() { CHECK(runner->close(10000)); }

    DeviceScene scene;
    DeviceCounts counts;
    std::optional<SegmentFiles> files;
    std::optional<IoRunner> runner;
    std::optional<SegmentIo> io;
};

}  // namespace

TEST(a_segment_without_a_footer_is_gone_through_and_given_one) {
    Scene scene("footer");
    int error = 0;
    std::optional<FoundSegment> found = scene.io->find(0, error);
    CHECK(found && !found->has_footer && found->is_whole);
    CHECK_EQUAL(found->entries.size(), std::size_t{10});
    CHECK_EQUAL(error, 0);
    CHECK(scene.counts.read_bytes > 0);
    scene.files->go_on_with_life(0, found->life);
    CHECK(!scene.io->find_entries(0));
    CHECK(scene.io->write_footer(0, *found));
    CHECK_EQUAL(scene.counts.written_bytes, footer_bytes(10));
    CHECK_EQUAL(scene.io->find_entries(0).value().size(), std::size_t{10});
    CHECK(scene.io->find(0, error)->has_footer);
}

TEST(a_footer_is_written_only_where_its_room_was_kept) {
    Scene scene("no_room");
    int error = 0;
    std::optional<FoundSegment> found = scene.io->find(0, error);
    found->entries.back().offset = kSmallSegment - 8192;
    CHECK(!scene.io->write_footer(0, *found));
    CHECK_EQUAL(scene.counts.written_bytes, std::uint64_t{0});
}

TEST(the_first_error_is_told_and_each_is_counted) {
    Scene scene("error");
    fail_kind(*scene.scene.plan, IoKind::read, EIO);
    int error = 0;
    CHECK(!scene.io->find(0, error));
    CHECK_EQUAL(error, EIO);
    CHECK_EQUAL(scene.counts.io_errors, std::uint64_t{1});
    CHECK(!scene.io->find_entries(0));
    CHECK_EQUAL(scene.counts.io_errors, std::uint64_t{2});
}

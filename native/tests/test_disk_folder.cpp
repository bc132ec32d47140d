#include "disk/disk_folder.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>

#include "check.hpp"
#include "child_process.hpp"
#include "made_up_files.hpp"

using namespace kvo;
using test::ChildProcess;
using test::Line;
using test::MadeUpFiles;

namespace {

constexpr std::uint64_t kBytes = 1 << 20;

struct Scene {
    explicit Scene(const std::string& name) : files("disk_folder_" + name) {
        CHECK_EQUAL(chmod(files.root().c_str(), 0700), 0);
    }
    Result<DiskFolder> open(std::uint64_t segment_bytes = kBytes, std::uint64_t store = 0,
                            bool may_create = true) const {
        return DiskFolder::open({files.root().string(), segment_bytes, may_create, store});
    }
    std::string why(std::uint64_t segment_bytes = kBytes, std::uint64_t store = 0, bool may_create = true) const {
        const Result<DiskFolder> folder = open(segment_bytes, store, may_create);
        CHECK(!folder.ok());
        CHECK(folder.fault().message().find('\n') == std::string::npos);
        CHECK(folder.fault().message().find(files.root().string()) != std::string::npos);
        return folder.fault().message();
    }
    MadeUpFiles files;
};

bool has(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST(an_empty_folder_becomes_a_store_and_stays_the_same) {
    const Scene scene("new");
    std::uint64_t store = 0;
    {
        const Result<DiskFolder> folder = scene.open();
        CHECK(folder.ok() && folder.value().is_new() && folder.value().check().ok());
        store = folder.value().store();
    }
    const Result<DiskFolder> again = scene.open(kBytes, store, false);
    CHECK(again.ok() && !again.value().is_new());
    CHECK_EQUAL(again.value().store(), store);
}

TEST(what_is_not_meant_is_refused_with_the_reason) {
    const Scene scene("refused");
    CHECK(has(scene.why(kBytes, 0, false), "identity"));  // nothing is made unless it may be
    const std::uint64_t store = scene.open().value().store();
    CHECK(has(scene.why(2 * kBytes), "1048576 bytes, not 2097152"));
    CHECK(has(scene.why(kBytes, store + 1), "another store"));
    CHECK_EQUAL(chmod(scene.files.root().c_str(), 0750), 0);
    CHECK(has(scene.why(), "0700"));
    CHECK_EQUAL(chmod(scene.files.root().c_str(), 0700), 0);
    scene.files.write("identity", "kvoffload disk 1\nstore 12\nsegment_bytes 1048576");
    CHECK(has(scene.why(), "damaged"));
    CHECK(has(DiskFolder::open({"nowhere/at/all", kBytes, true, 0}).fault().message(), "No such file"));
}

TEST(a_folder_with_segments_and_no_identity_is_not_taken_over) {
    const Scene scene("foreign");
    scene.files.write("segment-000003", "whose?");
    CHECK(has(scene.why(), "no identity file"));
}

TEST(a_folder_of_another_user_is_refused) {
    if (geteuid() != 0) {
        std::printf("needs root: only root can give a folder away\n");
        return;
    }
    const Scene scene("owner");
    CHECK_EQUAL(chown(scene.files.root().c_str(), 12345, 12345), 0);
    CHECK(has(scene.why(), "belongs to user 12345, not to 0"));
}

TEST(one_process_has_it) {
    const Scene scene("lock");
    ChildProcess owner([&scene](const Line& line) {
        const Result<DiskFolder> folder = scene.open();
        line.tell(folder.ok() ? 'y' : 'n');
        line.await();
        return 0;
    });
    CHECK_EQUAL(owner.line().await(), 'y');
    CHECK(has(scene.why(), std::to_string(owner.pid()).c_str()));
    owner.send_signal(SIGKILL);
    owner.wait_exit();
    const Result<DiskFolder> folder = scene.open();
    CHECK(folder.ok());
    CHECK(has(scene.why(), "another server uses it"));  // nor has this process twice
}

TEST(segments_are_whole_files_with_room_of_their_own) {
    const Scene scene("segments");
    const Result<DiskFolder> folder = scene.open();
    CHECK(folder.value().create_segment(2).ok());
    CHECK(folder.value().create_segment(0).ok());
    CHECK(!folder.value().create_segment(0).ok());
    struct stat facts;
    CHECK_EQUAL(stat((scene.files.root() / "segment-000002").c_str(), &facts), 0);
    CHECK_EQUAL(static_cast<std::uint64_t>(facts.st_size), kBytes);
    CHECK(static_cast<std::uint64_t>(facts.st_blocks) * 512 >= kBytes);
    CHECK_EQUAL(facts.st_mode & 0777, mode_t{0600});
    scene.files.write("segment-7", "not ours");
    CHECK(folder.value().list_segments().value() == std::vector<std::uint32_t>({0, 2}));
    CHECK(folder.value().open_segment(2).ok());

    CHECK_EQUAL(truncate((scene.files.root() / "segment-000002").c_str(), 100), 0);
    CHECK(folder.value().open_segment(2).fault().code() == Code::unavailable);
    std::filesystem::remove(scene.files.root() / "segment-000000");
    std::filesystem::create_symlink("segment-000002", scene.files.root() / "segment-000000");
    CHECK(!folder.value().open_segment(0).ok());
    CHECK(folder.value().remove_segment(2).ok());
    CHECK(folder.value().remove_segment(2).ok());
    CHECK(!folder.value().open_segment(2).ok());
    CHECK(folder.value().try_writing().ok());
}

TEST(segments_go_past_the_kernels_cache_where_the_file_system_lets_them) {
    const Scene scene("direct");
    const Result<DiskFolder> folder = scene.open();
    const FileDescriptor own(open((scene.files.root() / "own").c_str(), O_CREAT | O_RDWR | O_DIRECT | O_CLOEXEC, 0600));
    const bool has_direct = own.is_open();
    const auto is_direct = [](const Result<FileDescriptor>& file) {
        return (fcntl(file.value().number(), F_GETFL) & O_DIRECT) != 0;
    };
    CHECK_EQUAL(is_direct(folder.value().create_segment(0)), has_direct);
    CHECK_EQUAL(is_direct(folder.value().open_segment(0)), has_direct);
    if (!has_direct) {
        std::printf("O_DIRECT is missing: %s has none\n", scene.files.root().c_str());
    }
}

TEST(it_sees_that_its_path_leads_elsewhere) {
    const Scene scene("moved");
    const Result<DiskFolder> folder = scene.open();
    const std::filesystem::path aside = scene.files.root().string() + "_aside";
    std::filesystem::rename(scene.files.root(), aside);
    CHECK(has(folder.value().check().message(), "it has gone"));
    std::filesystem::create_directory(scene.files.root());
    CHECK(has(folder.value().check().message(), "its mount has gone"));
    std::filesystem::remove(scene.files.root());
    std::filesystem::rename(aside, scene.files.root());
    CHECK(folder.value().check().ok());
    std::filesystem::remove(scene.files.root() / "identity");
    CHECK(has(folder.value().check().message(), "identity file has gone"));
    CHECK(!folder.value().try_writing().ok());
}

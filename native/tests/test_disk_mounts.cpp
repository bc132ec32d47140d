// A device on a file system of its own, small enough to be filled, and remounted and taken away while it is in use.
#include <sys/mount.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>

#include "check.hpp"
#include "disk_fixture.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }

// An ext4 of 24 MiB in a file. `why_not`: what this machine lacks for that.
struct SmallFileSystem {
    explicit SmallFileSystem(const std::string& name) : files("disk_mount_" + name) {
        image = (files.root() / "image").string();
        target = (files.root() / "mounted").string();
        std::filesystem::create_directory(target);
        std::ofstream(image).close();
        std::filesystem::resize_file(image, 24 << 20);
        if (geteuid() != 0) {
            why_not = "needs root, to mount";
        } else if (!run("mkfs.ext4 -q -F -O ^has_journal -m 0 " + image)) {
            why_not = "needs mkfs.ext4";
        } else if (!mount("")) {
            why_not = "needs loop devices, and to be let mount them";
        } else {
            CHECK_EQUAL(mkdir(folder().c_str(), 0700), 0);
        }
        if (!why_not.empty()) {
            std::printf("skipped: it %s\n", why_not.c_str());
        }
    }
    ~SmallFileSystem() { umount2(target.c_str(), MNT_DETACH); }
    SmallFileSystem(const SmallFileSystem&) = delete;
    SmallFileSystem& operator=(const SmallFileSystem&) = delete;

    bool mount(const std::string& options) const { return run("mount -o loop" + options + " " + image + " " + target); }
    bool remount(const char* how) const { return run(std::string("mount -o remount,") + how + " " + target); }
    std::string folder() const { return target + "/store"; }

    MadeUpFiles files;
    std::string image, target, why_not;
};

struct Scene {
    explicit Scene(const std::string& name) : file_system(name), device("disk_mount_scene_" + name) {
        device.terms.path = file_system.folder();
    }
    bool can_run() const { return file_system.why_not.empty(); }
    DeviceHealth await(DeviceState state) const {
        DeviceHealth health;
        device.step_until([&] {
            health = device.device->health();
            return health.state == state;
        });
        return health;
    }

    SmallFileSystem file_system;
    DeviceScene device;
};

}  // namespace

TEST(a_file_system_that_fills_up_holds_what_it_has_room_for) {
    Scene scene("full");
    if (!scene.can_run()) {
        return;
    }
    scene.device.terms.capacity_bytes = 100 * kSmallSegment;
    scene.device.open();
    for (std::uint64_t number = 0; number < 3000; number += 50) {
        CHECK(scene.device.put(range(number, 50), 20000, false).are_all(DiskOutcome::written));
    }
    const DeviceHealth health = scene.device.health();
    CHECK(health.state == DeviceState::ready);
    CHECK(health.segments > 8 && health.segments < 24);
    CHECK(health.counts.evicted_segments > 20);
    CHECK_EQUAL(scene.device.get(range(2950, 50), 20000).check_found(), std::size_t{50});
    scene.device.reopen();
    CHECK_EQUAL(scene.device.get(range(2950, 50), 20000).check_found(), std::size_t{50});
    scene.device.drop();
}

TEST(a_file_system_without_room_is_read_only_in_one_line_and_used_when_there_is_some) {
    Scene scene("none");
    if (!scene.can_run()) {
        return;
    }
    const std::string ballast = scene.file_system.target + "/ballast";
    CHECK(!run("dd if=/dev/zero of=" + ballast + " bs=1M count=100"));  // until it is full
    std::filesystem::resize_file(ballast, std::filesystem::file_size(ballast) - (64 << 10));
    scene.device.open();
    scene.device.start(make_records(DiskVerb::put, {1}, 0));
    CHECK(scene.await(DeviceState::read_only).reason.find("No space left") != std::string::npos);
    std::filesystem::remove(ballast);
    scene.await(DeviceState::ready);
    CHECK(scene.device.put({1}, 20000).are_all(DiskOutcome::durable));
    scene.device.drop();
}

TEST(a_file_system_that_others_fill_takes_no_record_from_a_small_store_and_writes_resume_when_there_is_room) {
    Scene scene("filled");
    if (!scene.can_run()) {
        return;
    }
    const std::string ballast = scene.file_system.target + "/ballast";
    scene.device.open();
    CHECK(scene.device.put(range(0, 50), 10000).are_all(DiskOutcome::durable));
    CHECK(!run("dd if=/dev/zero of=" + ballast + " bs=1M count=100"));  // until it is full
    scene.device.reopen();
    CHECK(scene.device.put({100}, 10000).are_all(DiskOutcome::unavailable));  // at once, not at its deadline
    DeviceHealth health = scene.device.health();
    CHECK(health.state == DeviceState::read_only);
    CHECK(health.reason.find("No space left") != std::string::npos);
    // A block for the probe is not yet room for a segment.
    std::filesystem::resize_file(ballast, std::filesystem::file_size(ballast) - (64 << 10));
    for (int step = 0; step < 100; ++step) {
        health = scene.device.health();
        CHECK(health.state == DeviceState::read_only && health.counts.evicted_segments == 0);
    }
    CHECK_EQUAL(scene.device.get(range(0, 50), 10000).check_found(), std::size_t{50});
    std::filesystem::remove(ballast);
    scene.await(DeviceState::ready);
    CHECK(scene.device.put({100}, 10000).are_all(DiskOutcome::durable));
    CHECK_EQUAL(scene.device.get(range(0, 50), 10000).check_found(), std::size_t{50});
    scene.device.drop();
}

TEST(a_read_only_remount_is_noticed_and_its_end_too) {
    Scene scene("read_only");
    if (!scene.can_run()) {
        return;
    }
    scene.device.open();
    // Files that are open for writing keep a file system from it; the kernel's own remount after an error does not ask.
    CHECK(scene.device.put(range(0, 20), 20000).are_all(DiskOutcome::durable));
    CHECK(scene.device.close());
    CHECK(scene.file_system.remount("ro"));
    scene.device.open();
    CHECK(scene.device.health().state == DeviceState::absent);
    CHECK(scene.device.health().reason.find("Read-only file system") != std::string::npos);
    CHECK(scene.device.put({50}, 100).are_all(DiskOutcome::unavailable));
    CHECK(scene.file_system.remount("rw"));
    scene.await(DeviceState::ready);
    CHECK_EQUAL(scene.device.get(range(0, 20), 20000).check_found(), std::size_t{20});
    scene.device.drop();
}

TEST(a_mount_that_vanishes_is_noticed_and_taken_up_again) {
    Scene scene("vanished");
    if (!scene.can_run()) {
        return;
    }
    scene.device.open();
    CHECK(scene.device.put(range(0, 20), 20000).are_all(DiskOutcome::durable));
    CHECK_EQUAL(umount2(scene.file_system.target.c_str(), MNT_DETACH), 0);
    CHECK(scene.await(DeviceState::absent).reason.find("No such file") != std::string::npos);
    CHECK(scene.device.get({1}, 20000).are_all(DiskOutcome::unavailable));
    // Nothing is made on the file system below.
    CHECK(std::filesystem::is_empty(scene.file_system.target));
    CHECK(scene.file_system.mount(""));
    scene.await(DeviceState::ready);
    CHECK_EQUAL(scene.device.get(range(0, 20), 20000).check_found(), std::size_t{20});
    scene.device.drop();
}

#include "io/io_queue.hpp"

#include <cerrno>
#include <cstring>
#include <string>

#include "check.hpp"
#include "faulty_io.hpp"
#include "io/io_engine.hpp"
#include "io_contract.hpp"

using namespace kvo;
using namespace std::chrono_literals;
using test::aligned;
using test::FaultPlan;
using test::IoFault;
using test::kPage;

namespace {

const Instant kNever = Instant::max();

// A queue over a real engine that goes wrong as the plan says, on a file of pages.
struct Scene {
    explicit Scene(const char* kind, std::size_t depth = 4, std::size_t write_depth = 2, int pages = 16)
        : folder(std::string("io_queue_") + kind), file(test::page_file(folder, "pages", pages)) {
        Result<MadeEngine> made = make_io_engine(kind, depth);
        CHECK(made.ok());
        queue = std::make_unique<IoQueue>(std::make_unique<test::FaultyIo>(std::move(made.value().engine), plan),
                                          write_depth);
    }
    void order(IoKind kind, std::uint64_t page, std::byte* memory, std::size_t length, std::uint64_t token,
               Instant deadline = kNever) const {
        queue->submit(
            {{kind, file.number(), page * kPage, memory, static_cast<std::uint32_t>(length), token}, deadline});
    }
    std::vector<IoResult> await(std::size_t count, Instant now = Instant()) const {
        std::vector<IoResult> results;
        for (queue->poll(now, results); results.size() < count; queue->poll(now, results)) {
            CHECK(wait_readable(queue->file(), 60000));
        }
        return results;
    }

    test::MadeUpFiles folder;
    FileDescriptor file;
    std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
    std::unique_ptr<IoQueue> queue;
};

void each_kind(const std::function<void(const char*)>& body) {
    body("auto");
    body("threads");
}

}  // namespace

TEST(short_transfers_are_made_whole) {
    each_kind([](const char* kind) {
        const Scene scene(kind);
        const AlignedMemory out = aligned(5 * kPage, 0x77);
        AlignedMemory in = aligned(5 * kPage);
        int parts = 0;
        // Two pages and a bit of each: the bit is moved again, as the rest must be aligned.
        scene.plan->set([&parts](const IoRequest& request) {
            ++parts;
            return request.length > 2 * kPage ? IoFault{IoFault::Kind::cut, 0, 2 * kPage} : IoFault{};
        });
        scene.order(IoKind::write, 4, out.start(), 5 * kPage, 1);
        CHECK_EQUAL(scene.await(1)[0].error, 0);
        CHECK_EQUAL(parts, 3);
        scene.order(IoKind::read, 4, in.start(), 5 * kPage, 2);
        CHECK_EQUAL(scene.await(1)[0].error, 0);
        CHECK_EQUAL(parts, 6);
        CHECK(std::memcmp(in.start(), out.start(), 5 * kPage) == 0);
    });
}

TEST(what_does_not_move_at_all_is_an_error) {
    each_kind([](const char* kind) {
        const Scene scene(kind);
        AlignedMemory memory = aligned(2 * kPage);
        scene.order(IoKind::read, 15, memory.start(), 2 * kPage, 1);  // the file ends in the middle
        CHECK_EQUAL(scene.await(1)[0].error, ENODATA);
        // Drivers give this error for a medium that cannot be read.
        scene.plan->set([](const IoRequest&) { return IoFault{IoFault::Kind::error, ENODATA, 0}; });
        scene.order(IoKind::read, 0, memory.start(), kPage, 3);
        CHECK_EQUAL(scene.await(1)[0].error, EIO);
        scene.plan->set([](const IoRequest&) { return IoFault{IoFault::Kind::cut, 0, 0}; });
        scene.order(IoKind::write, 0, memory.start(), kPage, 2);
        CHECK_EQUAL(scene.await(1)[0].error, ENOSPC);
    });
}

TEST(errors_come_as_they_are_and_interruptions_are_repeated) {
    each_kind([](const char* kind) {
        const Scene scene(kind);
        AlignedMemory memory = aligned(kPage);
        int calls = 0;
        scene.plan->set([&calls](const IoRequest&) {
            const int errors[] = {EINTR, EAGAIN, EIO};
            return IoFault{IoFault::Kind::error, errors[calls++], 0};
        });
        scene.order(IoKind::read, 0, memory.start(), kPage, 1);
        CHECK_EQUAL(scene.await(1)[0].error, EIO);
        CHECK_EQUAL(calls, 3);
    });
}

TEST(reads_go_before_writes_that_wait) {
    each_kind([](const char* kind) {
        const Scene scene(kind, 4, 2);
        AlignedMemory memory = aligned(7 * kPage);
        std::string order;
        scene.plan->set([&order](const IoRequest& request) {
            order += request.kind == IoKind::read ? 'r' : request.kind == IoKind::write ? 'w' : 's';
            return IoFault{};
        });
        for (std::uint64_t token = 0; token < 4; ++token) {
            scene.order(token == 3 ? IoKind::sync : IoKind::write, 0, memory.start() + token * kPage, kPage, token);
        }
        for (std::uint64_t token = 4; token < 7; ++token) {
            scene.order(IoKind::read, 1, memory.start() + token * kPage, kPage, token);
        }
        std::vector<IoResult> results;
        scene.queue->poll(Instant(), results);
        CHECK_EQUAL(order, "rrrw");
        scene.await(7 - results.size());
        CHECK_EQUAL(order.substr(0, 4), "rrrw");
        CHECK_EQUAL(scene.queue->pending(), std::size_t{0});
    });
}

TEST(writes_leave_room_for_a_read) {
    const Scene scene("auto", 4, 2);
    AlignedMemory memory = aligned(kPage);
    scene.plan->set([](const IoRequest& request) {
        return request.kind == IoKind::write ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    for (std::uint64_t token = 0; token < 8; ++token) {
        scene.order(IoKind::write, 0, memory.start(), kPage, token);
    }
    std::vector<IoResult> results;
    scene.queue->poll(Instant(), results);
    scene.order(IoKind::read, 1, memory.start(), kPage, 100);
    CHECK_EQUAL(scene.await(1)[0].token, std::uint64_t{100});
}

TEST(a_hang_costs_its_deadline_and_the_memory_until_it_ends) {
    each_kind([](const char* kind) {
        const Scene scene(kind);
        AlignedMemory memory = aligned(kPage);
        scene.plan->set([](const IoRequest&) { return IoFault{IoFault::Kind::hang, 0, 0}; });
        const Instant deadline = Instant() + 5s;
        scene.order(IoKind::read, 3, memory.start(), kPage, 9, deadline);
        std::vector<IoResult> results;
        scene.queue->poll(Instant() + 4s, results);
        CHECK(results.empty());
        CHECK(scene.queue->next_deadline() == deadline);
        scene.queue->poll(deadline, results);
        CHECK_EQUAL(results.size(), std::size_t{1});
        CHECK_EQUAL(results[0].error, ETIMEDOUT);
        CHECK(results[0].is_held && !results[0].is_late);
        CHECK_EQUAL(scene.queue->held(), std::size_t{1});
        CHECK(scene.queue->next_deadline() == Instant::max());

        scene.plan->release();
        const std::vector<IoResult> late = scene.await(1, deadline);
        CHECK(late[0].is_late && !late[0].is_held);
        CHECK_EQUAL(late[0].token, std::uint64_t{9});
        CHECK_EQUAL(scene.queue->held(), std::size_t{0});
        CHECK(memory.start()[0] == std::byte{3});
        CHECK(scene.queue->close(60000));
    });
}

TEST(a_queue_with_a_hang_says_that_its_memory_must_stay) {
    each_kind([](const char* kind) {
        const Scene scene(kind);
        AlignedMemory memory = aligned(kPage);
        scene.plan->set([](const IoRequest&) { return IoFault{IoFault::Kind::hang, 0, 0}; });
        scene.order(IoKind::read, 3, memory.start(), kPage, 9);
        std::vector<IoResult> results;
        scene.queue->poll(Instant(), results);
        CHECK(!scene.queue->close(0));
    });
}

TEST(what_waits_behind_a_hang_expires_with_its_memory_free) {
    const Scene scene("auto", 1, 1);
    AlignedMemory memory = aligned(kPage);
    scene.plan->set([](const IoRequest&) { return IoFault{IoFault::Kind::hang, 0, 0}; });
    scene.order(IoKind::read, 0, memory.start(), kPage, 1);
    scene.order(IoKind::read, 0, memory.start(), kPage, 2, Instant() + 1s);
    std::vector<IoResult> results;
    scene.queue->poll(Instant(), results);
    CHECK(results.empty());
    scene.queue->poll(Instant() + 1s, results);
    CHECK_EQUAL(results.size(), std::size_t{1});
    CHECK_EQUAL(results[0].token, std::uint64_t{2});
    CHECK(results[0].error == ETIMEDOUT && !results[0].is_held);
}

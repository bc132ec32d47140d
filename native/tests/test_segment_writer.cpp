#include "disk/segment_writer.hpp"

#include <cstring>
#include <map>

#include "check.hpp"
#include "disk_fixture.hpp"
#include "io_contract.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// A writer over a file, and what it told.
struct Scene {
    explicit Scene(const char* name) : folder(name), terms(small_terms("unused")) {
        terms.segment_bytes = 256 << 10;
        file = page_file(folder, "segment", 64);
        Result<MadeEngine> made = make_io_engine("auto", 8);
        CHECK(made.ok());
        runner = std::make_unique<IoRunner>(std::make_unique<FaultyIo>(std::move(made.value().engine), plan), 4);
        pool = std::make_unique<BufferPool>(aligned(16 * terms.write_buffer_bytes), terms.write_buffer_bytes);
        WriterSeat seat;
        seat.file = file.number();
        seat.life = {5, 6};
        seat.written = [this](const AppendedRecord& record) { written.push_back(record.item); };
        seat.durable = [this](const AppendedRecord& record) { durable.push_back(record.item); };
        seat.spent = [this](std::uint64_t bytes) { spent += bytes; };
        seat.failed = [this](const std::string& what) { failures.push_back(what); };
        writer = std::make_unique<SegmentWriter>(std::move(seat), terms, *runner, *pool);
    }

    void append(std::uint32_t number, std::size_t length) {
        Records records = make_records(DiskVerb::put, range(0, number + 1), length, true);
        CHECK(writer->has_room(length) && writer->has_buffers(length));
        CHECK(writer->append(records.batch, number));
        kept.push_back(std::move(records));
    }
    template <typename Condition>
    void run_until(Condition condition) {
        while (!condition()) {
            writer->maintain(terms.now());
            if (runner->poll(terms.now()) == 0) {
                wait_readable(runner->queue().file(), 1);
            }
        }
    }

    MadeUpFiles folder;
    DeviceTerms terms;
    FileDescriptor file;
    std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
    std::unique_ptr<IoRunner> runner;
    std::unique_ptr<BufferPool> pool;
    std::unique_ptr<SegmentWriter> writer;
    std::vector<Records> kept;
    std::vector<std::uint32_t> written, durable;
    std::vector<std::string> failures;
    std::uint64_t spent = 0;
};

}  // namespace

TEST(records_share_a_write_and_are_told_in_order) {
    Scene scene("writer_order");
    int writes = 0;
    scene.plan->set([&writes](const IoRequest& request) {
        writes += request.kind == IoKind::write ? 1 : 0;
        return IoFault{};
    });
    for (std::uint32_t i = 0; i < 10; ++i) {
        scene.append(i, 1000);
    }
    CHECK(scene.written.empty());
    scene.run_until([&] { return scene.durable.size() == 10; });
    CHECK_EQUAL(writes, 1);
    CHECK(scene.written == scene.durable);
    CHECK(std::ranges::is_sorted(scene.written));
    CHECK_EQUAL(scene.spent, round_up(kHeadBytes + 10 * record_footprint(1000), kIoAlignment));
}

TEST(nothing_is_told_before_what_lies_in_front_of_it_is_written) {
    Scene scene("writer_hole");
    // The first buffer's write hangs, the second one's does not.
    scene.plan->set([](const IoRequest& request) {
        return request.kind == IoKind::write && request.offset == 0 ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    scene.append(0, 60000);
    scene.append(1, 70000);
    for (int i = 0; i < 20; ++i) {
        scene.writer->maintain(scene.terms.now());
        scene.runner->poll(scene.terms.now());
        wait_readable(scene.runner->queue().file(), 1);
    }
    CHECK(scene.written.empty());
    scene.plan->release();
    scene.run_until([&] { return scene.durable.size() == 2; });
}

TEST(a_record_is_durable_by_a_sync_that_began_behind_it) {
    Scene scene("writer_sync");
    scene.plan->set([](const IoRequest& request) {
        return request.kind == IoKind::sync ? IoFault{IoFault::Kind::hang, 0, 0} : IoFault{};
    });
    scene.append(0, 100);
    scene.run_until([&] { return scene.written.size() == 1; });
    scene.writer->maintain(scene.terms.now());  // a sync begins, for the first one
    scene.runner->poll(scene.terms.now());
    scene.append(1, 100);
    scene.run_until([&] { return scene.written.size() == 2; });
    CHECK(scene.durable.empty());
    scene.plan->set({});
    scene.plan->release();
    scene.run_until([&] { return !scene.durable.empty(); });
    CHECK_EQUAL(scene.durable.size(), std::size_t{1});
    scene.run_until([&] { return scene.durable.size() == 2; });
}

TEST(a_sealed_segment_has_a_footer_and_is_done_when_that_is_durable) {
    Scene scene("writer_seal");
    std::uint32_t count = 0;
    for (; scene.writer->has_room(10000) && scene.writer->has_buffers(10000); ++count) {
        scene.append(count, 10000);
    }
    CHECK(count > 20);
    scene.writer->seal();
    CHECK(!scene.writer->has_room(0));
    CHECK(!scene.writer->is_done());
    scene.run_until([&] { return scene.writer->is_done(); });
    CHECK_EQUAL(scene.durable.size(), std::size_t{count});
    CHECK(scene.writer->has_footer());
    CHECK_EQUAL(scene.pool->free_count(), scene.pool->count());
    const AlignedMemory tail = aligned(kIoAlignment);
    CHECK_EQUAL(pread(scene.file.number(), tail.start(), kIoAlignment,
                      static_cast<off_t>(scene.terms.segment_bytes - kIoAlignment)),
                static_cast<ssize_t>(kIoAlignment));
    FooterTail read;
    std::memcpy(&read, tail.start(), sizeof read);
    CHECK(is_footer_tail(read, {5, 6}, scene.terms.segment_bytes));
    CHECK_EQUAL(read.entry_count, std::uint64_t{count});
}

TEST(a_record_whose_bytes_are_damaged_leaves_no_trace) {
    Scene scene("writer_damaged");
    scene.append(0, 1000);
    const std::size_t free = scene.pool->free_count();
    const Records damaged = make_records(DiskVerb::put, {1}, 200000);
    damaged.batch->item(0).address[199999] ^= std::byte{1};
    CHECK(!scene.writer->append(damaged.batch, 0));
    CHECK_EQUAL(scene.pool->free_count(), free);
    CHECK_EQUAL(scene.writer->entries().size(), std::size_t{1});
    scene.append(2, 1000);
    scene.run_until([&] { return scene.durable.size() == 2; });
}

TEST(a_failure_is_told_once_and_everybody_ends) {
    Scene scene("writer_failure");
    fail_kind(*scene.plan, IoKind::write, EIO);
    scene.append(0, 60000);
    scene.append(1, 60000);
    scene.append(2, 60000);
    scene.run_until([&] { return scene.writer->is_done(); });
    CHECK_EQUAL(scene.failures.size(), std::size_t{1});
    CHECK_EQUAL(scene.failures[0], "write: Input/output error");
    CHECK(scene.written.empty());
    for (std::uint32_t i = 0; i < 3; ++i) {
        CHECK(scene.kept[i].batch->item(i).outcome == DiskOutcome::failed);
    }
    CHECK_EQUAL(scene.pool->free_count(), scene.pool->count());
}

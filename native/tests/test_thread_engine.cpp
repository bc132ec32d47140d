#include "io/thread_engine.hpp"

#include "check.hpp"
#include "io_contract.hpp"

using namespace kvo;

TEST(threads_are_an_io_engine) {
    Result<std::unique_ptr<IoEngine>> engine = ThreadEngine::create(16);
    CHECK(engine.ok());
    test::check_io_contract(std::move(engine.value()));
}

TEST(one_thread_is_an_io_engine) {
    Result<std::unique_ptr<IoEngine>> engine = ThreadEngine::create(1);
    CHECK(engine.ok());
    test::check_io_contract(std::move(engine.value()));
}

TEST(an_engine_that_goes_leaves_nothing_half_done_behind_it) {
    const test::MadeUpFiles folder("io_threads_end");
    const FileDescriptor file = test::page_file(folder, "pages", 4);
    AlignedMemory memory = test::aligned(kIoAlignment);
    {
        Result<std::unique_ptr<IoEngine>> engine = ThreadEngine::create(2);
        CHECK(engine.ok());
        const IoRequest request{IoKind::read, file.number(), 2 * kIoAlignment, memory.start(), kIoAlignment, 1};
        CHECK_EQUAL(engine.value()->submit({&request, 1}), std::size_t{1});
        CHECK(engine.value()->close(60000));  // what was taken is done first
    }
    CHECK(memory.start()[0] == std::byte{2});
}

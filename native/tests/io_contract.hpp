// The contract of every I/O engine: one list of checks, run on each.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "io/aligned_memory.hpp"
#include "io/io_engine.hpp"
#include "io/io_queue.hpp"
#include "made_up_files.hpp"
#include "shim/file_descriptor.hpp"

namespace kvo::test {

inline constexpr std::size_t kPage = kIoAlignment;

inline AlignedMemory aligned(std::size_t bytes, int fill = 0) {
    Result<AlignedMemory> memory = AlignedMemory::create(bytes);
    CHECK(memory.ok());
    std::memset(memory.value().start(), fill, memory.value().bytes());
    return std::move(memory.value());
}

// A file of `pages` pages, page i full of the byte i; by O_DIRECT where the file system has it.
inline FileDescriptor page_file(const MadeUpFiles& folder, const std::string& name, int pages) {
    const std::string path = (folder.root() / name).string();
    FileDescriptor plain(open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    for (int page = 0; page < pages; ++page) {
        const std::string bytes(kPage, static_cast<char>(page));
        CHECK_EQUAL(write(plain.number(), bytes.data(), kPage), static_cast<ssize_t>(kPage));
    }
    FileDescriptor direct(open(path.c_str(), O_RDWR | O_DIRECT | O_CLOEXEC));
    return direct.is_open() ? std::move(direct) : std::move(plain);
}

// Waits until so many have ended.
inline std::vector<IoEnd> await_ends(IoEngine& engine, std::size_t count) {
    std::vector<IoEnd> ended;
    for (engine.poll(ended); ended.size() < count; engine.poll(ended)) {
        CHECK(wait_readable(engine.file(), 60000));
    }
    return ended;
}

inline void check_reads_and_writes(IoEngine& engine) {
    const MadeUpFiles folder(std::string("io_contract_") + engine.name());
    const FileDescriptor file = page_file(folder, "pages", 8);
    AlignedMemory memory = aligned(8 * kPage);
    std::vector<IoRequest> requests;
    for (std::uint64_t page = 0; page < 8; ++page) {
        requests.push_back({IoKind::read, file.number(), page * kPage, memory.start() + page * kPage, kPage, page});
    }
    CHECK_EQUAL(engine.submit(requests), std::min<std::size_t>(8, engine.depth()));
    std::uint64_t seen = 0;
    for (const IoEnd& ended : await_ends(engine, std::min<std::size_t>(8, engine.depth()))) {
        CHECK_EQUAL(ended.outcome, static_cast<std::int64_t>(kPage));
        seen |= std::uint64_t{1} << ended.token;
        CHECK(memory.start()[ended.token * kPage + 7] == static_cast<std::byte>(ended.token));
    }
    CHECK_EQUAL(seen, (std::uint64_t{1} << std::min<std::size_t>(8, engine.depth())) - 1);

    const AlignedMemory written = aligned(kPage, 0x5a);
    const IoRequest write_one{IoKind::write, file.number(), 3 * kPage, written.start(), kPage, 77};
    CHECK_EQUAL(engine.submit({&write_one, 1}), std::size_t{1});
    CHECK_EQUAL(await_ends(engine, 1)[0].token, std::uint64_t{77});
    const IoRequest sync{IoKind::sync, file.number(), 0, nullptr, 0, 78};
    CHECK_EQUAL(engine.submit({&sync, 1}), std::size_t{1});
    CHECK_EQUAL(await_ends(engine, 1)[0].outcome, std::int64_t{0});
    const IoRequest read_back{IoKind::read, file.number(), 3 * kPage, memory.start(), kPage, 79};
    CHECK_EQUAL(engine.submit({&read_back, 1}), std::size_t{1});
    await_ends(engine, 1);
    CHECK(std::memcmp(memory.start(), written.start(), kPage) == 0);
}

inline void check_ends_of_files_and_faults(IoEngine& engine) {
    const MadeUpFiles folder(std::string("io_faults_") + engine.name());
    const FileDescriptor file = page_file(folder, "pages", 2);
    AlignedMemory memory = aligned(4 * kPage);
    const IoRequest across{IoKind::read, file.number(), kPage, memory.start(), 2 * kPage, 1};
    CHECK_EQUAL(engine.submit({&across, 1}), std::size_t{1});
    CHECK_EQUAL(await_ends(engine, 1)[0].outcome, static_cast<std::int64_t>(kPage));  // short, and told as it is
    const IoRequest none{IoKind::read, -1, 0, memory.start(), kPage, 2};
    CHECK_EQUAL(engine.submit({&none, 1}), std::size_t{1});
    CHECK_EQUAL(await_ends(engine, 1)[0].outcome, std::int64_t{-EBADF});
}

inline void check_bounded(IoEngine& engine) {
    const MadeUpFiles folder(std::string("io_bound_") + engine.name());
    const FileDescriptor file = page_file(folder, "pages", 1);
    AlignedMemory memory = aligned((engine.depth() + 5) * kPage);
    std::vector<IoRequest> requests;
    for (std::size_t i = 0; i < engine.depth() + 5; ++i) {
        requests.push_back({IoKind::read, file.number(), 0, memory.start() + i * kPage, kPage, 4});
    }
    CHECK_EQUAL(engine.submit(requests), engine.depth());
    CHECK_EQUAL(engine.submit(requests), std::size_t{0});  // ended or not: room comes by polling
    CHECK_EQUAL(await_ends(engine, engine.depth()).size(), engine.depth());
    CHECK(!wait_readable(engine.file(), 0));
    CHECK_EQUAL(engine.submit({requests.data(), 1}), std::size_t{1});
    CHECK(engine.close(60000));
}

inline void check_io_contract(std::unique_ptr<IoEngine> engine) {
    check_reads_and_writes(*engine);
    check_ends_of_files_and_faults(*engine);
    check_bounded(*engine);
}

}  // namespace kvo::test

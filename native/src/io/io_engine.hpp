// Reads and writes of files that go on while the caller does something else: what every way of doing that has in
// common.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.hpp"

namespace kvo {

// Offsets, addresses and lengths for O_DIRECT files are multiples of this.
inline constexpr std::size_t kIoAlignment = 4096;

enum class IoKind : std::uint8_t {
    read,
    write,
    sync,  // fdatasync: of what had been written when it was submitted
};

struct IoRequest {
    IoKind kind = IoKind::read;
    int file = -1;
    std::uint64_t offset = 0;
    std::byte* address = nullptr;
    std::uint32_t length = 0;
    std::uint64_t token = 0;  // the caller's, comes back with the end
};

struct IoEnd {
    std::uint64_t token = 0;
    std::int64_t outcome = 0;  // bytes, which may be fewer than asked for, or minus an errno
};

// For one thread at a time. Requests end in any order. A request's memory belongs to the engine until its end has been
// polled.
class IoEngine {
public:
    virtual ~IoEngine() = default;

    virtual const char* name() const noexcept = 0;
    virtual std::size_t depth() const noexcept = 0;  // requests that may be under way

    // Takes requests in their order until there is no room. Returns how many it took. Never waits for a file.
    virtual std::size_t submit(std::span<const IoRequest> requests) = 0;

    // Appends the requests that have ended since the last call, each once, and makes `file` unreadable unless more end
    // meanwhile.
    virtual void poll(std::vector<IoEnd>& ended) = 0;

    // An eventfd, readable from the end of a request on until it is polled.
    virtual int file() const noexcept = 0;

    // Waits for requests under way. Returns false if some still are after the timeout; their memory must then stay for
    // good.
    virtual bool close(int timeout_ms) = 0;
};

// Makes the I/O engine that this machine supports.

struct MadeEngine {
    std::unique_ptr<IoEngine> engine;
    std::string why_no_uring;  // one line; empty where io_uring was had or not asked for
};

// `kind`: "io_uring", "threads", or "auto" for io_uring where the kernel lets us have it and threads otherwise.
Result<MadeEngine> make_io_engine(std::string_view kind, std::size_t depth);

}  // namespace kvo

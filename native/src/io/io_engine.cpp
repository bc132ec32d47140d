#include "io/io_engine.hpp"

#include <utility>

#include "io/thread_engine.hpp"
#include "io/uring_engine.hpp"

namespace kvo {
namespace {

constexpr std::size_t kMaxDepth = 256;  // beyond it a number is a mistake

}  // namespace

Result<MadeEngine> make_io_engine(std::string_view kind, std::size_t depth) {
    const bool is_auto = kind == "auto";
    if (depth == 0 || depth > kMaxDepth) {
        return Status(Code::invalid,
                      "an I/O depth is 1 to " + std::to_string(kMaxDepth) + ", not " + std::to_string(depth));
    }
    if (!is_auto && kind != "io_uring" && kind != "threads") {
        return Status(Code::invalid, "an I/O engine is auto, io_uring or threads, not " + std::string(kind));
    }
    std::string why;
    if (kind != "threads") {
        Result<std::unique_ptr<IoEngine>> ring = UringEngine::create(depth);
        if (ring.ok()) {
            return MadeEngine{std::move(ring.value()), {}};
        }
        if (!is_auto) {
            return ring.fault();
        }
        why = ring.fault().message();
    }
    Result<std::unique_ptr<IoEngine>> threads = ThreadEngine::create(depth);
    if (!threads.ok()) {
        return threads.fault();
    }
    return MadeEngine{std::move(threads.value()), std::move(why)};
}

}  // namespace kvo

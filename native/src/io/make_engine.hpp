// Makes the I/O engine that this machine supports.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.hpp"
#include "io/io_engine.hpp"

namespace kvo {

struct MadeEngine {
    std::unique_ptr<IoEngine> engine;
    std::string why_no_uring;  // one line; empty where io_uring was had or not asked for
};

// `kind`: "io_uring", "threads", or "auto" for io_uring where the kernel lets us have it and threads otherwise.
Result<MadeEngine> make_io_engine(std::string_view kind, std::size_t depth);

}  // namespace kvo

// Whether this process may use io_uring: asked of the kernel, since versions and sandboxes both decide.
#pragma once

#include "base/status.hpp"

namespace kvo {

// Makes the smallest ring and closes it. Code::unavailable, with the reason in words, if the kernel refuses.
Status probe_io_uring();

// Returns Code::unavailable with an explanation of this errno of io_uring_setup.
Status io_uring_refusal(int error);

// Explains an errno of io_uring_setup to the machine's operator. `disabled_level` is kernel.io_uring_disabled, or -1 if
// the kernel has no such setting.
std::string explain_io_uring_refusal(int error, int disabled_level);

}  // namespace kvo

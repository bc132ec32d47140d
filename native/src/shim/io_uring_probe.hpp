// Whether this process may use io_uring: asked of the kernel, since versions and sandboxes both decide.
#pragma once

#include "base/status.hpp"

namespace kvo {

// Makes the smallest ring and closes it. Code::unavailable, with the reason in words, if the kernel refuses.
Status probe_io_uring();

// Code::unavailable, with what an errno of io_uring_setup means here.
Status io_uring_refusal(int error);

// What an errno of io_uring_setup means to whoever runs the machine. `disabled_level` is kernel.io_uring_disabled,
// or -1 where the kernel has no such setting.
std::string explain_io_uring_refusal(int error, int disabled_level);

}  // namespace kvo

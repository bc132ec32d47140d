// What each file of this folder adds to the module, and what they share.
#pragma once

#include <nanobind/nanobind.h>

#include "base/status.hpp"

namespace kvo {

void bind_hash(nanobind::module_& module);
void bind_capabilities(nanobind::module_& module);

// A broken contract is the caller's fault, so a ValueError; anything else a RuntimeError. Needs the GIL.
inline void raise_if_not_ok(const Status& status) {
    if (status.ok()) {
        return;
    }
    if (status.code() == Code::invalid) {
        throw nanobind::value_error(status.message().c_str());
    }
    nanobind::raise("%s", status.message().c_str());
}

}  // namespace kvo

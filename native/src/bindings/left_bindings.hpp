// Calls of a cache for a thread that never waits for the writer's lock.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/cache_handle.hpp"

namespace kvo {

void bind_left(nanobind::module_& module, nanobind::class_<Cache>& cache);

}  // namespace kvo

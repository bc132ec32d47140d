// What people who look into a cache may ask it.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/cache_handle.hpp"

namespace kvo {

void bind_survey(nanobind::class_<Cache>& cache);

}  // namespace kvo

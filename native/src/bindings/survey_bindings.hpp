// Bindings of the queries by which people look into a cache.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/cache_handle.hpp"

namespace kvo {

void bind_survey(nanobind::class_<Cache>& cache);

}  // namespace kvo

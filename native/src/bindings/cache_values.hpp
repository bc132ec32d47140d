// Conversions to and from Python's values, for the bindings of the cache and of its readers.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>
#include <vector>

#include "bindings/bindings.hpp"
#include "index/layout.hpp"

namespace kvo {

template <typename Value>
Value take(Result<Value> result) {
    raise_if_not_ok(result.ok() ? Status{} : result.fault());
    return std::move(result.value());
}

template <typename Number>
nanobind::bytes to_bytes(const std::vector<Number>& numbers) {
    return nanobind::bytes(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(Number));
}

inline Space space_of(std::uint32_t name_space, std::uint32_t group) {
    if (name_space >= kNamespaceNumbers || group >= kGroupLimit) {
        throw nanobind::value_error("no such group");
    }
    return make_space(name_space, group);
}

}  // namespace kvo

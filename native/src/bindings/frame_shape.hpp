// How a message's fields lie in a frame: the declarations of protocol/fields.py, compiled.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "frames/plain_frame.hpp"

namespace kvo::frames {

struct Shape;

// One kind of field, with the same checks as its namesake in protocol/fields.py.
struct Kind {
    enum class Is { whole, truth, choice, blob, several, shape };
    Is is;
    std::uint64_t minimum = 0, maximum = 0;  // of the number, or of a blob's items
    std::uint64_t item_bytes = 1;
    nanobind::object names = {};  // of a choice: numbers to names
    nanobind::object type = {};
    std::vector<Kind> item = {};  // of a list: one
    std::vector<Shape> shape = {};
};

struct Count {
    std::size_t at, item_bytes, of, of_item_bytes;
    bool or_none, or_multiple;
};

struct Shape {
    nanobind::object record;
    std::vector<std::pair<nanobind::object, Kind>> fields;
    std::vector<Count> counts;
};

// Reads a plan that Shape.plan() made. Passing anything else is the caller's bug.
Shape read_shape(nanobind::tuple plan);

std::size_t blob_size(nanobind::handle blob);
void check_blob(const Kind& kind, std::size_t size);

// `values` are those of all fields.
void check_counts(const Shape& shape, const std::vector<nanobind::object>& values);

}  // namespace kvo::frames

#include "bindings/frame_shape.hpp"

#include <nanobind/stl/string.h>

#include <string>

namespace nb = nanobind;

namespace kvo::frames {
namespace {

Kind read_kind(nb::tuple plan);

}  // namespace

Shape read_shape(nb::tuple plan) {
    Shape shape{.record = plan[0], .fields = {}, .counts = {}};
    for (nb::handle field : nb::cast<nb::tuple>(plan[1])) {
        PyObject* name = PyUnicode_InternFromString(nb::cast<std::string>(field[0]).c_str());
        shape.fields.emplace_back(nb::steal(name), read_kind(nb::cast<nb::tuple>(field[1])));
    }
    for (nb::handle count : nb::cast<nb::tuple>(plan[2])) {
        shape.counts.push_back({nb::cast<std::size_t>(count[0]), nb::cast<std::size_t>(count[1]),
                                nb::cast<std::size_t>(count[2]), nb::cast<std::size_t>(count[3]),
                                nb::cast<bool>(count[4]), nb::cast<bool>(count[5])});
    }
    return shape;
}

namespace {

Kind read_kind(nb::tuple plan) {
    const auto name = nb::cast<std::string>(plan[0]);
    const auto number = [&](int at) { return nb::cast<std::uint64_t>(plan[at]); };
    if (name == "whole") {
        return {.is = Kind::Is::whole, .minimum = number(1), .maximum = number(2)};
    }
    if (name == "truth") {
        return {.is = Kind::Is::truth};
    }
    if (name == "choice") {
        return {.is = Kind::Is::choice, .names = plan[2], .type = plan[1]};
    }
    if (name == "blob") {
        return {.is = Kind::Is::blob, .minimum = number(2), .maximum = number(3), .item_bytes = number(1)};
    }
    Kind kind{.is = Kind::Is::several};
    if (name == "several") {
        kind.maximum = number(2);
        kind.item.push_back(read_kind(nb::cast<nb::tuple>(plan[1])));
    } else {
        kind.is = Kind::Is::shape;
        kind.shape.push_back(read_shape(plan[1]));
    }
    return kind;
}

}  // namespace

std::size_t blob_size(nb::handle blob) { return static_cast<std::size_t>(PyBytes_Size(blob.ptr())); }

void check_blob(const Kind& kind, std::size_t size) {
    const std::size_t count = size / kind.item_bytes;
    if (size % kind.item_bytes != 0 || count < kind.minimum || count > kind.maximum) {
        throw NotPlain{};
    }
}

void check_counts(const Shape& shape, const std::vector<nb::object>& values) {
    for (const Count& rule : shape.counts) {
        const std::size_t count = blob_size(values[rule.at]) / rule.item_bytes;
        const std::size_t wanted = blob_size(values[rule.of]) / rule.of_item_bytes;
        const bool is_none = (rule.or_none || rule.or_multiple) && count == 0;
        const bool is_multiple = rule.or_multiple && wanted != 0 && count % wanted == 0;
        if (count != wanted && !is_none && !is_multiple) {
            throw NotPlain{};
        }
    }
}

}  // namespace kvo::frames

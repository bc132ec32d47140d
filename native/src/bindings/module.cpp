// The extension's door. Python is known in this folder only.
#include <nanobind/nanobind.h>

#include "bindings/bindings.hpp"

NB_MODULE(_native, module) {
    module.doc() = "kvoffload's native core. Import it through kvoffload.native.";
    kvo::bind_hash(module);
    kvo::bind_capabilities(module);
}

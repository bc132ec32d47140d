// The Status of a system call that failed.
#pragma once

#include <cerrno>
#include <string>
#include <string_view>
#include <system_error>

#include "base/status.hpp"

namespace kvo {

inline Status system_fault(std::string_view what, int error) {
    return {Code::failed, std::string(what) + ": " + std::generic_category().message(error)};
}

}  // namespace kvo

// Which libcrypto seals in this process: the machine's, or a newer one of a package.
#pragma once

#include <string>

#include "base/status.hpp"
#include "link/libcrypto.hpp"

namespace kvo {

// From any thread. It lives as long as the process. Code::unavailable: there is none.
Result<const Libcrypto*> seal_library();

// True: what is made from now on seals with the library of this file, whose absolute path the caller trusts, since its
// code runs here. It is newer than the machine's, seals and opens what a standard says, and agrees with the machine's
// both ways. False: it is not newer, and all stays as it is, as it does with a fault. Code::unavailable: it is no
// libcrypto that does this. Code::invalid: no absolute path, or another file is in use.
Result<bool> use_seal_library(const std::string& file);

}  // namespace kvo

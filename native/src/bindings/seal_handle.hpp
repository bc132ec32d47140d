// The keys of a key file as Python has them: the disk's threads use them too.
#pragma once

#include <memory>

#include "codec/record_seal.hpp"

namespace kvo {

struct SealKeysHandle {
    std::shared_ptr<const SealKeys> keys;
};

}  // namespace kvo

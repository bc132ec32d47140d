// The policies by the names that commands use.
#pragma once

#include <memory>
#include <string_view>
#include <vector>

#include "base/status.hpp"
#include "evict/eviction_policy.hpp"

namespace kvo {

std::vector<std::string_view> policy_names();

// Code::invalid lists the known names.
Result<MakePolicy> find_policy(std::string_view name);
Result<std::unique_ptr<EvictionPolicy>> make_policy(std::string_view name, PolicyBounds bounds);

}  // namespace kvo

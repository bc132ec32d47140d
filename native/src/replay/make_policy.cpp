#include "replay/make_policy.hpp"

#include <string>

#include "evict/prefix_policy.hpp"
#include "replay/arc.hpp"
#include "replay/lru.hpp"
#include "replay/s3fifo.hpp"

namespace kvo {
namespace {

using Policy = std::unique_ptr<EvictionPolicy>;

struct Kind {
    std::string_view name;
    MakePolicy make;
};

const Kind kKinds[] = {
    {"lru", [](PolicyBounds) -> Policy { return std::make_unique<LruPolicy>(); }},
    {"slru", [](PolicyBounds bounds) -> Policy { return std::make_unique<SlruPolicy>(bounds); }},
    {"s3fifo", [](PolicyBounds bounds) -> Policy { return std::make_unique<S3FifoPolicy>(bounds); }},
    {"arc", [](PolicyBounds bounds) -> Policy { return std::make_unique<ArcPolicy>(bounds); }},
    {"prefix", make_prefix_policy},
};

}  // namespace

std::vector<std::string_view> policy_names() {
    std::vector<std::string_view> names;
    for (const Kind& kind : kKinds) {
        names.push_back(kind.name);
    }
    return names;
}

Result<MakePolicy> find_policy(std::string_view name) {
    std::string known;
    for (const Kind& kind : kKinds) {
        if (kind.name == name) {
            return kind.make;
        }
        known += (known.empty() ? "" : ", ") + std::string(kind.name);
    }
    return Status(Code::invalid, "no eviction policy is called '" + std::string(name) + "'; known are " + known);
}

Result<Policy> make_policy(std::string_view name, PolicyBounds bounds) {
    const auto make = find_policy(name);
    if (!make.ok()) {
        return make.fault();
    }
    return make.value()(bounds);
}

}  // namespace kvo

#include "replay/make_policy.hpp"

#include <string>

#include "replay/arc.hpp"
#include "replay/lru.hpp"
#include "evict/prefix_policy.hpp"
#include "replay/s3fifo.hpp"
#include "replay/slru.hpp"

namespace kvo {
namespace {

using Policy = std::unique_ptr<EvictionPolicy>;

struct Kind {
    std::string_view name;
    Policy (*make)(PolicyBounds bounds);
};

constexpr Kind kKinds[] = {
    {"lru", [](PolicyBounds) -> Policy { return std::make_unique<LruPolicy>(); }},
    {"slru", [](PolicyBounds bounds) -> Policy { return std::make_unique<SlruPolicy>(bounds); }},
    {"s3fifo", [](PolicyBounds bounds) -> Policy { return std::make_unique<S3FifoPolicy>(bounds); }},
    {"arc", [](PolicyBounds bounds) -> Policy { return std::make_unique<ArcPolicy>(bounds); }},
    {"prefix", [](PolicyBounds bounds) -> Policy { return std::make_unique<PrefixPolicy>(bounds); }},
};

}  // namespace

std::vector<std::string_view> policy_names() {
    std::vector<std::string_view> names;
    for (const Kind& kind : kKinds) {
        names.push_back(kind.name);
    }
    return names;
}

Result<Policy> make_policy(std::string_view name, PolicyBounds bounds) {
    std::string known;
    for (const Kind& kind : kKinds) {
        if (kind.name == name) {
            return kind.make(bounds);
        }
        known += (known.empty() ? "" : ", ") + std::string(kind.name);
    }
    return Status(Code::invalid, "no eviction policy is called '" + std::string(name) + "'; known are " + known);
}

}  // namespace kvo

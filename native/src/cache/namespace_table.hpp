// The identities whose blocks are kept: each has a number, by which keys name it, and its groups' geometry.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.hpp"
#include "evict/eviction_policy.hpp"
#include "index/boundary.hpp"
#include "index/index_view.hpp"

namespace kvo {

using Fingerprint = std::array<std::uint8_t, 32>;

// What follows from a geometry, computed once.
struct GroupFacts {
    Reuse reuse = Reuse::prefix;
    std::uint32_t window_blocks = 0;
    std::uint32_t anchor = 0;  // the group that an entry's parent is in
    std::uint64_t slot_bytes = 0;
};

struct Namespace {
    std::uint32_t number = 0;
    Fingerprint fingerprint{};
    Geometry geometry;
    bool needs_state = false;
    bool has_shards = false;
    std::vector<GroupFacts> groups;
};

// `find` may be called from any thread and takes no lock; a namespace that was found stays.
class NamespaceTable {
public:
    using Reserve = std::function<Status(const Region&, std::uint64_t item_count)>;

    NamespaceTable(const IndexView& view, Reserve reserve);

    // The number of this identity, the same for the same fingerprint. Code::invalid: the geometry cannot be served or
    // its records fit no segment, or the fingerprint is known with another geometry; then two engines do not mean the
    // same by it.
    Result<std::uint32_t> open(const Fingerprint& fingerprint, const Geometry& geometry);

    // nullptr: no namespace has this number.
    const Namespace* find(std::uint32_t number) const noexcept;

    // Reads records that another process wrote and that are not known here, up to the first that makes no sense.
    void adopt();

    // Numbers of these identities are nobody's, and given again where all others are taken. None of them has an entry,
    // and nobody looks for one meanwhile.
    void forget(const std::function<bool(std::uint32_t)>& is_it);

    // Numbers below were ever given.
    std::uint32_t count() const noexcept { return count_.load(std::memory_order_acquire); }
    // Identities that have one now.
    std::uint32_t known() const noexcept { return known_.load(std::memory_order_relaxed); }

private:
    Status check(const Geometry& geometry) const;
    std::uint32_t choose_number() const noexcept;
    void publish(std::uint32_t number, const Fingerprint& fingerprint, Geometry geometry);

    const IndexView view_;
    const Reserve reserve_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<const Namespace>> owned_;
    std::array<std::atomic<const Namespace*>, kNamespaceLimit> by_number_{};
    std::atomic<std::uint32_t> count_ = 0;
    std::atomic<std::uint32_t> known_ = 0;
};

}  // namespace kvo

// The identities whose blocks are kept: each has a number, by which keys name it, and its groups' geometry.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "evict/eviction_policy.hpp"
#include "index/boundary.hpp"
#include "index/index_view.hpp"

namespace kvo {

using Fingerprint = std::array<std::uint8_t, 32>;

// Values that follow from a geometry, computed once.
struct GroupFacts {
    Reuse reuse = Reuse::prefix;
    std::uint32_t window_blocks = 0;
    std::uint32_t anchor = 0;  // the group that an entry's parent is in
    std::uint64_t slot_bytes = 0;
    std::uint64_t class_bytes = 0;  // of the slots that such records are given
    // For a group of full attention: the other such groups. A block of one group is of no use without theirs.
    std::vector<std::uint32_t> companions;
};

struct Namespace {
    std::uint32_t number = 0;
    Fingerprint fingerprint{};
    Geometry geometry;
    bool needs_state = false;
    bool has_shards = false;
    std::vector<GroupFacts> groups;
};

// A call that goes on with a namespace: so long it stays.
class NamespaceUse {
public:
    NamespaceUse() = default;
    NamespaceUse(std::atomic<std::uint32_t>* uses, const Namespace* used) : uses_(uses), used_(used) {}
    NamespaceUse(NamespaceUse&& other) noexcept
        : uses_(std::exchange(other.uses_, nullptr)), used_(std::exchange(other.used_, nullptr)) {}
    NamespaceUse& operator=(NamespaceUse&& other) noexcept {
        std::swap(uses_, other.uses_);
        std::swap(used_, other.used_);
        return *this;
    }
    ~NamespaceUse() {
        if (uses_ != nullptr) {
            uses_->fetch_sub(1, std::memory_order_release);
        }
    }

    const Namespace* get() const noexcept { return used_; }
    const Namespace& operator*() const noexcept { return *used_; }
    const Namespace* operator->() const noexcept { return used_; }
    explicit operator bool() const noexcept { return used_ != nullptr; }

private:
    std::atomic<std::uint32_t>* uses_ = nullptr;
    const Namespace* used_ = nullptr;
};

// `use` and `find` may be called from any thread and take no lock.
class NamespaceTable {
public:
    using Reserve = std::function<Status(const Region&, std::uint64_t item_count)>;
    using IsIt = std::function<bool(std::uint32_t number)>;

    NamespaceTable(const IndexView& view, Reserve reserve);

    // The number of this identity, the same for the same fingerprint. Code::invalid: the geometry cannot be served or
    // its records fit no segment, or the fingerprint is known with another geometry; then two engines do not mean the
    // same by it.
    Result<std::uint32_t> open(const Fingerprint& fingerprint, const Geometry& geometry);

    // False: no namespace has this number (any more).
    NamespaceUse use(std::uint32_t number) const noexcept;

    // Records that one block of the group has; 0: no such group.
    std::uint32_t shards_of(Space space) const noexcept;

    // Returns the same without keeping it alive, for a caller who has an entry or a use that does. nullptr: there is no
    // such namespace.
    const Namespace* find(std::uint32_t number) const noexcept {
        const Namespace* const found = by_place_[place_of_namespace(number)].load(std::memory_order_acquire);
        return found != nullptr && found->number == number ? found : nullptr;
    }

    // Reads records that another process wrote and that are not known here, up to the first that makes no sense.
    // An identity that the other process has forgotten is forgotten here when another one has its place.
    void adopt();

    // Forgets the identities that `is_it` names, unless a call goes on with them, and returns which ones were
    // forgotten. None of them may have an entry. Their numbers name nothing from then on. A free place is given again
    // only once all others are taken, and the one that was given back first comes first. A call that wants an identity
    // while the table checks it for the last time does not get it.
    std::vector<std::uint32_t> forget(const IsIt& is_it);

    // Numbers of all.
    std::vector<std::uint32_t> list() const;

    // Places below were ever given.
    std::uint32_t count() const noexcept { return count_.load(std::memory_order_acquire); }
    // Identities that have one now.
    std::uint32_t known() const noexcept { return known_.load(std::memory_order_relaxed); }

private:
    static constexpr std::uint32_t kIsEnding = 1U << 31;  // in a count of uses: no new use may begin

    Status check(const Geometry& geometry) const;
    std::uint32_t choose_place() const noexcept;
    void publish(std::uint32_t number, const Fingerprint& fingerprint, Geometry geometry);
    void leave(std::uint32_t place);

    const IndexView view_;
    const Reserve reserve_;
    mutable std::mutex mutex_;
    std::vector<std::unique_ptr<const Namespace>> owned_;
    std::deque<std::uint32_t> free_places_;  // of those below the count
    std::array<std::atomic<const Namespace*>, kNamespaceLimit> by_place_{};
    mutable std::array<std::atomic<std::uint32_t>, kNamespaceLimit> uses_{};  // by place
    std::atomic<std::uint32_t> count_ = 0;
    std::atomic<std::uint32_t> known_ = 0;
};

}  // namespace kvo

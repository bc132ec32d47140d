// The cache that Python holds, and what is checked before its core is called.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "bindings/bindings.hpp"
#include "cache/cache_core.hpp"

namespace kvo {

// Returns a shared core whose destruction, which may take long (it gives memory back), runs without the GIL.
inline std::shared_ptr<CacheCore> share(std::unique_ptr<CacheCore> core) {
    return {core.release(), [](CacheCore* last) {
                std::optional<WithoutGil> unlocked;
                if (WithoutGil::is_possible()) {
                    unlocked.emplace();
                }
                delete last;
            }};
}

// A cache and the process it belongs to. Its memory lives until it is closed and no view of it is left.
class Cache {
public:
    explicit Cache(std::shared_ptr<CacheCore> core) : core_(std::move(core)) {}

    std::shared_ptr<CacheCore> core() const {
        if (getpid() != process_) {
            throw nanobind::value_error("the cache belongs to the process that made it, and this is a child of it");
        }
        if (!core_) {
            throw nanobind::value_error("the cache is closed");
        }
        return core_;
    }

    void close() { core_.reset(); }

private:
    std::shared_ptr<CacheCore> core_;
    const pid_t process_ = getpid();
};

// Calls `work(core)` without the GIL, while the core cannot be closed.
template <typename Work>
auto without_gil(const Cache& cache, Work work) {
    const std::shared_ptr<CacheCore> core = cache.core();
    const WithoutGil unlocked;
    return work(*core);
}

inline std::span<const std::uint8_t> hashes_of(const BufferView& buffer) {
    if (buffer.bytes().size() % kHashBytes != 0) {
        throw nanobind::value_error("hashes have 32 bytes each");
    }
    return buffer.bytes();
}

// A space that exists.
inline Space open_space(const Cache& cache, std::uint32_t name_space, std::uint32_t group) {
    const Space space = space_of(name_space, group);
    if (cache.core()->namespaces().shards_of(space) == 0) {
        throw nanobind::value_error("no such group");
    }
    return space;
}

// The same, or one of an identity that is not known (any more): nothing lies there.
inline Space space_to_look_in(const Cache& cache, std::uint32_t name_space, std::uint32_t group) {
    const Space space = space_of(name_space, group);
    return cache.core()->namespaces().shards_of(make_space(name_space, 0)) == 0 ? space
                                                                                : open_space(cache, name_space, group);
}

// Returns the number of shards of the group with the most; ValueError if there is no such namespace.
inline std::uint32_t most_shards(const Cache& cache, std::uint32_t name_space) {
    const std::shared_ptr<CacheCore> core = cache.core();
    std::uint32_t most = 0;
    for (std::uint32_t group = 0; name_space < kNamespaceNumbers && group < kGroupLimit; ++group) {
        const std::uint32_t shards = core->namespaces().shards_of(make_space(name_space, group));
        if (shards == 0) {
            break;
        }
        most = std::max(most, shards);
    }
    if (most == 0) {
        throw nanobind::value_error(("no namespace has number " + std::to_string(name_space)).c_str());
    }
    return most;
}

inline void check_shards(std::span<const std::uint32_t> wanted, std::uint32_t shards) {
    for (const std::uint32_t shard : wanted) {
        if (shard >= shards) {
            throw nanobind::value_error(("no group there has a shard " + std::to_string(shard)).c_str());
        }
    }
}

// Calls of a cache for a thread that never waits for the writer's lock.

void bind_left(nanobind::module_& module, nanobind::class_<Cache>& cache);

// Bindings of the queries by which people look into a cache.

void bind_survey(nanobind::class_<Cache>& cache);

}  // namespace kvo

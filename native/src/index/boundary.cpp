#include "index/boundary.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <string>

namespace kvo {
namespace {

// Looked up at a time: a prefix usually ends somewhere, and what lies behind its end need not be asked for.
constexpr std::size_t kPrefixStep = 256;

// Boundaries are multiples of it. 0: there is none up to `limit`, or no group keeps anything.
std::uint64_t common_step(std::span<const GroupGeometry> groups, std::uint64_t alignment, std::uint64_t limit) {
    std::uint64_t step = alignment;
    bool is_kept = false;
    for (const GroupGeometry& group : groups) {
        if (step == 0 || step > limit) {
            return 0;
        }
        const std::uint64_t factor = group.block_size / std::gcd(step, group.block_size);
        if (factor > limit / step) {
            return 0;
        }
        step *= factor;
        is_kept = is_kept || group.rule != BoundaryRule::nothing;
    }
    return is_kept ? step : 0;
}

}  // namespace

Status check_geometry(const Geometry& geometry) {
    const auto refuse = [](std::size_t group, const std::string& what) {
        return Status(Code::invalid, "group " + std::to_string(group) + ": " + what);
    };
    if (geometry.groups.empty() || geometry.groups.size() > kGroupLimit) {
        return Status(Code::invalid, "a geometry has 1 to " + std::to_string(kGroupLimit) + " groups, not " +
                                         std::to_string(geometry.groups.size()));
    }
    if (geometry.hash_block_size == 0) {
        return Status(Code::invalid, "a hash must cover at least 1 token");
    }
    for (std::size_t i = 0; i < geometry.groups.size(); ++i) {
        const GroupGeometry& group = geometry.groups[i];
        if (group.block_size == 0 || group.block_size % geometry.hash_block_size != 0) {
            return refuse(i, "blocks of " + std::to_string(group.block_size) + " tokens are no multiple of the " +
                                 std::to_string(geometry.hash_block_size) + " tokens of a hash");
        }
        if (group.record_bytes == 0) {
            return refuse(i, "a record must have at least 1 byte");
        }
        if (group.shards == 0 || group.shards > kShardLimit) {
            return refuse(
                i, "an entry has 1 to " + std::to_string(kShardLimit) + " shards, not " + std::to_string(group.shards));
        }
        if (group.record_bytes > std::numeric_limits<std::uint64_t>::max() / group.shards) {
            return refuse(i, "an entry of " + std::to_string(group.shards) + " records of " +
                                 std::to_string(group.record_bytes) + " bytes is too large to be counted");
        }
        if (group.rule > BoundaryRule::nothing) {
            return refuse(i, "its rule is none that this build knows");
        }
        const bool has_window = group.rule == BoundaryRule::window || group.rule == BoundaryRule::chunk;
        if (has_window && group.window == 0) {
            return refuse(i, "its rule needs a window of at least 1 token");
        }
    }
    return {};
}

BlockRange needed_blocks(const GroupGeometry& group, std::uint64_t local, std::uint64_t boundary) {
    const std::uint64_t end = boundary / group.block_size;
    std::uint64_t first = local / group.block_size;
    switch (group.rule) {
        case BoundaryRule::prefix:
            break;
        case BoundaryRule::window:
            // The token at `boundary` sees itself and window - 1 tokens before it.
            first = std::max(first, boundary + 1 > group.window ? (boundary + 1 - group.window) / group.block_size : 0);
            break;
        case BoundaryRule::chunk:
            first = std::max(first, boundary / group.window * group.window / group.block_size);
            break;
        case BoundaryRule::exact:
            first = end == 0 ? 0 : end - 1;
            break;
        case BoundaryRule::nothing:
            return {};
    }
    return {std::min(first, end), end};
}

std::uint64_t BoundarySearch::find(const IndexView& view, const Geometry& geometry, const BoundaryQuery& query) {
    const auto& groups = geometry.groups;
    groups_.resize(groups.size());
    const std::uint64_t hashed = query.chain.size() / kHashBytes * geometry.hash_block_size;
    const std::uint64_t limit = std::min(query.limit, hashed);
    const std::uint64_t step = common_step(groups, query.alignment, limit);
    if (step == 0) {
        return query.local;
    }
    std::uint64_t boundary = limit / step * step;
    for (std::size_t i = 0; i < groups.size() && boundary > query.local; ++i) {
        if (groups[i].rule == BoundaryRule::prefix) {
            boundary = find_prefix(view, geometry, query, i, boundary) / step * step;
        }
    }
    if (boundary <= query.local) {
        return query.local;
    }
    bool has_suffixes = false;
    for (std::size_t i = 0; i < groups.size(); ++i) {
        if (groups[i].rule != BoundaryRule::prefix && groups[i].rule != BoundaryRule::nothing) {
            find_all(view, geometry, query, i, boundary);
            has_suffixes = true;
        }
    }
    for (; has_suffixes && boundary > query.local; boundary -= step) {
        bool is_accepted = true;
        for (std::size_t i = 0; i < groups.size() && is_accepted; ++i) {
            is_accepted = groups[i].rule == BoundaryRule::prefix || groups[i].rule == BoundaryRule::nothing ||
                          accepts(groups[i], groups_[i], query.local, boundary);
        }
        if (is_accepted) {
            return boundary;
        }
    }
    return std::max(boundary, query.local);
}

std::uint64_t BoundarySearch::find_prefix(const IndexView& view, const Geometry& geometry, const BoundaryQuery& query,
                                          std::size_t group, std::uint64_t boundary) {
    const std::uint32_t block_size = geometry.groups[group].block_size;
    const std::size_t stride = block_size / geometry.hash_block_size;
    GroupFinds& finds = groups_[group];
    finds.first = query.local / block_size;
    finds.found.clear();
    const std::uint64_t end = boundary / block_size;
    for (std::uint64_t position = finds.first; position < end;) {
        const std::size_t count = std::min<std::uint64_t>(kPrefixStep, end - position);
        const std::size_t known = finds.found.size();
        finds.found.resize(known + count);
        find_entries(view, make_space(query.name_space, static_cast<std::uint32_t>(group)),
                     query.chain.subspan(position * stride * kHashBytes), stride,
                     std::span(finds.found).subspan(known, count));
        for (std::size_t i = 0; i < count; ++i) {
            if (finds.found[known + i].entry == kNoEntry) {
                return (position + i) * block_size;
            }
        }
        position += count;
    }
    return end * block_size;
}

void BoundarySearch::find_all(const IndexView& view, const Geometry& geometry, const BoundaryQuery& query,
                              std::size_t group, std::uint64_t boundary) {
    const std::uint32_t block_size = geometry.groups[group].block_size;
    const std::size_t stride = block_size / geometry.hash_block_size;
    GroupFinds& finds = groups_[group];
    finds.first = query.local / block_size;
    const std::uint64_t end = boundary / block_size;
    finds.found.assign(end - std::min(finds.first, end), Found{});
    finds.run.assign(finds.found.size(), 0);
    find_entries(view, make_space(query.name_space, static_cast<std::uint32_t>(group)),
                 query.chain.subspan(finds.first * stride * kHashBytes), stride, finds.found);
    std::uint32_t run = 0;
    for (std::size_t i = 0; i < finds.found.size(); ++i) {
        run = finds.found[i].entry == kNoEntry ? 0 : run + 1;
        finds.run[i] = run;
    }
}

bool BoundarySearch::accepts(const GroupGeometry& group, const GroupFinds& finds, std::uint64_t local,
                             std::uint64_t boundary) const {
    const BlockRange range = needed_blocks(group, local, boundary);
    return range.count() == 0 || finds.run[range.end - 1 - finds.first] >= range.count();
}

}  // namespace kvo

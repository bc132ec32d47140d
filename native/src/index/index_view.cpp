#include "index/index_view.hpp"

#include <algorithm>
#include <string>

namespace kvo {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint32_t kEntriesPerBucket = 6;  // on average when the table has grown to its full size

template <typename Item>
Region place_after(std::uint64_t offset, std::uint64_t item_limit) {
    return {(offset + kPage - 1) / kPage * kPage, sizeof(Item), item_limit};
}

// Leases name entries again and again, so their number has no natural bound; nodes hold 58 entries.
std::uint32_t lease_node_limit(EntryNumber entry_limit) { return std::max(4096u, entry_limit / 8); }

}  // namespace

IndexRegions plan_regions(EntryNumber entry_limit) {
    const std::uint64_t buckets = std::max<std::uint64_t>(64, entry_limit / kEntriesPerBucket + 1);
    IndexRegions regions;
    regions.tenants = place_after<TenantRecord>(sizeof(IndexHeader), kTenantLimit);
    regions.buckets = place_after<Bucket>(regions.tenants.end(), buckets);
    // Directly behind: one numbering. Even keys that all fall into one bucket find room.
    regions.overflow = {regions.buckets.end(), sizeof(Bucket), std::max<std::uint64_t>(64, entry_limit / 2)};
    regions.entries = place_after<Entry>(regions.overflow.end(), entry_limit);
    regions.digests = place_after<EntryDigest>(regions.entries.end(), entry_limit);
    regions.shard_digests = place_after<ShardDigests>(regions.digests.end(), entry_limit);
    regions.namespaces = place_after<NamespaceRecord>(regions.shard_digests.end(), kNamespaceLimit);
    regions.sessions = place_after<SessionRecord>(regions.namespaces.end(), kSessionLimit);
    regions.lease_nodes = place_after<LeaseNode>(regions.sessions.end(), lease_node_limit(entry_limit));
    regions.file_bytes = (regions.lease_nodes.end() + kPage - 1) / kPage * kPage;
    return regions;
}

void format_index(std::byte* base, const IndexBounds& bounds, std::uint64_t seed) {
    auto* const header = reinterpret_cast<IndexHeader*>(base);
    const IndexRegions regions = plan_regions(bounds.entry_limit);
    header->format = kIndexVersion;
    header->entry_limit = bounds.entry_limit;
    header->bucket_limit = static_cast<std::uint32_t>(regions.buckets.item_limit + regions.overflow.item_limit);
    header->lease_node_limit = static_cast<std::uint32_t>(regions.lease_nodes.item_limit);
    header->seed = seed;
    header->segment_bytes = bounds.segment_bytes;
    header->extent_bytes = bounds.extent_bytes;
    header->file_bytes = regions.file_bytes;
    header->magic = kIndexMagic;
}

Result<IndexView> view_index(std::span<std::byte> mapping) {
    const auto refuse = [](const std::string& what) { return Status(Code::invalid, "not a usable index: " + what); };
    if (mapping.size() < sizeof(IndexHeader)) {
        return refuse("its file has " + std::to_string(mapping.size()) + " bytes");
    }
    auto* const header = reinterpret_cast<IndexHeader*>(mapping.data());
    if (header->magic != kIndexMagic) {
        return refuse("its file does not begin as one");
    }
    if (header->format != kIndexVersion) {
        return refuse("it has format " + std::to_string(header->format) + ", this build knows format " +
                      std::to_string(kIndexVersion));
    }
    if (header->entry_limit == 0 || header->entry_limit > kEntryLimitMax) {
        return refuse("it is made for " + std::to_string(header->entry_limit) + " entries");
    }
    IndexView view;
    view.regions = plan_regions(header->entry_limit);
    if (header->file_bytes != view.regions.file_bytes || mapping.size() != view.regions.file_bytes) {
        return refuse("its file has " + std::to_string(mapping.size()) + " bytes, not the " +
                      std::to_string(view.regions.file_bytes) + " of its entry limit");
    }
    const bool fits = header->bucket_limit == view.regions.buckets.item_limit + view.regions.overflow.item_limit &&
                      header->lease_node_limit == view.regions.lease_nodes.item_limit &&
                      header->bucket_count.load() <= view.regions.buckets.item_limit &&
                      header->entry_count.load() <= header->entry_limit &&
                      header->lease_node_count.load() <= header->lease_node_limit &&
                      header->session_count.load() <= view.regions.sessions.item_limit;
    if (!fits) {
        return refuse("its counts are not those of " + std::to_string(header->entry_limit) + " entries at most");
    }
    const auto at = [&]<typename Item>(const Region& region, Item*& pointer) {
        pointer = reinterpret_cast<Item*>(mapping.data() + region.offset);
    };
    view.header = header;
    at(view.regions.tenants, view.tenants);
    at(view.regions.buckets, view.buckets);
    at(view.regions.entries, view.entries);
    at(view.regions.digests, view.digests);
    at(view.regions.shard_digests, view.shard_digests);
    at(view.regions.namespaces, view.namespaces);
    at(view.regions.sessions, view.sessions);
    at(view.regions.lease_nodes, view.lease_nodes);
    return view;
}

}  // namespace kvo

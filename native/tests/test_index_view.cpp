#include "index/index_view.hpp"

#include <array>
#include <functional>
#include <memory>

#include "check.hpp"

using namespace kvo;

namespace {

constexpr EntryNumber kEntries = 100;

// A formatted index in plain memory.
class Memory {
public:
    explicit Memory(EntryNumber entry_limit = kEntries)
        : size_(plan_regions(entry_limit).file_bytes),
          bytes_(static_cast<std::byte*>(::operator new(size_, std::align_val_t{4096}))) {
        std::fill_n(bytes_.get(), size_, std::byte{0});
        format_index(bytes_.get(), {.entry_limit = entry_limit, .segment_bytes = 1 << 20, .extent_bytes = 4096}, 7);
    }
    std::span<std::byte> span() { return {bytes_.get(), size_}; }
    IndexHeader& header() { return *reinterpret_cast<IndexHeader*>(bytes_.get()); }

private:
    struct Free {
        void operator()(std::byte* bytes) const { ::operator delete(bytes, std::align_val_t{4096}); }
    };
    std::size_t size_;
    std::unique_ptr<std::byte, Free> bytes_;
};

struct Refusal {
    const char* words;  // in the message
    std::function<void(IndexHeader&)> damage;
};

}  // namespace

TEST(regions_follow_each_other_and_have_room) {
    for (const EntryNumber limit : {1u, 7u, 100u, 4096u, 1'000'003u, kEntryLimitMax}) {
        const IndexRegions regions = plan_regions(limit);
        const std::array<const Region*, 9> all = {&regions.tenants,    &regions.buckets,  &regions.overflow,
                                                  &regions.entries,    &regions.digests,  &regions.shard_digests,
                                                  &regions.namespaces, &regions.sessions, &regions.lease_nodes};
        std::uint64_t end = sizeof(IndexHeader);
        for (const Region* const region : all) {
            CHECK(region->offset >= end);
            CHECK(region->offset % 4096 == 0 || region == &regions.overflow);
            CHECK(region->item_limit > 0);
            end = region->end();
        }
        CHECK(regions.file_bytes >= end && regions.file_bytes < end + 4096);
        CHECK_EQUAL(regions.overflow.offset, regions.buckets.end());  // one numbering
        CHECK_EQUAL(regions.entries.item_limit, limit);
        CHECK_EQUAL(regions.digests.item_limit, limit);
        CHECK_EQUAL(regions.shard_digests.item_limit, limit);
        // Numbers of buckets are below kNoBucket, and every entry has a place even if all share one chain.
        CHECK(regions.buckets.item_limit + regions.overflow.item_limit < kNoBucket);
        CHECK((regions.overflow.item_limit + 1) * Bucket::kCapacity >= limit);
    }
}

TEST(a_new_index_is_viewed_where_its_regions_lie) {
    Memory memory;
    const auto view = view_index(memory.span());
    CHECK(view.ok());
    const IndexView& at = view.value();
    const std::byte* const base = memory.span().data();
    const auto offset_of = [&](const void* item) { return static_cast<const std::byte*>(item) - base; };
    CHECK_EQUAL(offset_of(at.header), 0);
    CHECK(std::cmp_equal(offset_of(at.tenants), at.regions.tenants.offset));
    CHECK(std::cmp_equal(offset_of(at.buckets), at.regions.buckets.offset));
    CHECK(std::cmp_equal(offset_of(&at.buckets[at.regions.buckets.item_limit]), at.regions.overflow.offset));
    CHECK(std::cmp_equal(offset_of(at.entries), at.regions.entries.offset));
    CHECK(std::cmp_equal(offset_of(at.digests), at.regions.digests.offset));
    CHECK(std::cmp_equal(offset_of(at.shard_digests), at.regions.shard_digests.offset));
    CHECK(std::cmp_equal(offset_of(at.namespaces), at.regions.namespaces.offset));
    CHECK(std::cmp_equal(offset_of(at.sessions), at.regions.sessions.offset));
    CHECK(std::cmp_equal(offset_of(at.lease_nodes), at.regions.lease_nodes.offset));
    CHECK_EQUAL(at.header->entry_limit, kEntries);
    CHECK_EQUAL(at.header->seed, 7u);
    CHECK_EQUAL(at.header->segment_bytes, 1u << 20);
    CHECK_EQUAL(at.header->extent_bytes, 4096u);
}

TEST(what_is_no_index_of_this_format_is_refused) {
    const Refusal refusals[] = {
        {"does not begin as one", [](IndexHeader& header) { header.magic = 0; }},
        {"does not begin as one", [](IndexHeader& header) { header.magic ^= 1; }},
        {"format 7, this build knows format 6", [](IndexHeader& header) { header.format = 7; }},
        {"format 5, this build knows format 6", [](IndexHeader& header) { header.format = 5; }},
        {"format 0", [](IndexHeader& header) { header.format = 0; }},
        {"made for 0 entries", [](IndexHeader& header) { header.entry_limit = 0; }},
        {"made for 4294967295 entries", [](IndexHeader& header) { header.entry_limit = 0xffffffff; }},
        {"of its entry limit", [](IndexHeader& header) { header.entry_limit = 1'000'000; }},
        {"of its entry limit", [](IndexHeader& header) { header.file_bytes += 4096; }},
        {"counts", [](IndexHeader& header) { ++header.bucket_limit; }},
        {"counts", [](IndexHeader& header) { header.bucket_limit = 0xffffffff; }},
        {"counts", [](IndexHeader& header) { --header.lease_node_limit; }},
        {"counts", [](IndexHeader& header) { header.bucket_count = 65; }},
        {"counts", [](IndexHeader& header) { header.entry_count = kEntries + 1; }},
        {"counts", [](IndexHeader& header) { header.lease_node_count = header.lease_node_limit + 1; }},
        {"counts", [](IndexHeader& header) { header.session_count = kSessionLimit + 1; }},
    };
    for (const Refusal& refusal : refusals) {
        Memory memory;
        refusal.damage(memory.header());
        const auto view = view_index(memory.span());
        CHECK(!view.ok());
        CHECK(view.fault().code() == Code::invalid);
        const std::string& message = view.fault().message();
        if (message.find(refusal.words) == std::string::npos || message.find('\n') != std::string::npos) {
            kvo::test::fail(__FILE__, __LINE__, "'" + message + "' does not say: " + refusal.words);
        }
    }
}

TEST(a_mapping_of_another_size_is_refused) {
    Memory memory;
    const std::span<std::byte> bytes = memory.span();
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, sizeof(IndexHeader) - 1, sizeof(IndexHeader),
                                   std::size_t{4096}, bytes.size() - 4096, bytes.size() - 1}) {
        const auto view = view_index(bytes.first(size));
        CHECK(!view.ok());
        CHECK(view.fault().code() == Code::invalid);
        CHECK(view.fault().message().find(std::to_string(size) + " bytes") != std::string::npos);
    }
    CHECK(view_index(bytes).ok());
}

TEST(counts_at_their_limits_are_no_contradiction) {
    Memory memory;
    const IndexRegions regions = plan_regions(kEntries);
    memory.header().bucket_count = static_cast<std::uint32_t>(regions.buckets.item_limit);
    memory.header().entry_count = kEntries;
    memory.header().lease_node_count = memory.header().lease_node_limit;
    memory.header().session_count = kSessionLimit;
    CHECK(view_index(memory.span()).ok());
}

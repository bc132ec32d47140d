#include "fake_cuda/memory_table.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

namespace kvo::fake {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kDeviceAlignment = 256;
constexpr std::uint64_t kPackedBytes = std::uint64_t{1} << 30;
constexpr int kUnwritten = 0xa5;  // what nobody has written yet

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t to) { return (bytes + to - 1) / to * to; }
std::uint64_t whole_pages(std::uint64_t bytes) { return round_up(bytes, kPageBytes); }

// Whole pages. Does nothing to them.
bool is_mapped(AccessRange pages) {
    return msync(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, MS_ASYNC) == 0;
}

void free_bytes(std::uint8_t* bytes) { std::free(bytes); }

const char* name_of(MemoryKind kind) {
    switch (kind) {
        case MemoryKind::device:
            return "device memory";
        case MemoryKind::pinned:
            return "pinned memory";
        case MemoryKind::registered:
            break;
    }
    return "registered memory";
}

}  // namespace

std::string hex(std::uint64_t number) {
    char text[24];
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(number));
    return text;
}

AddressRange::AddressRange(std::uint64_t bytes)
    : begin_(mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)), bytes_(bytes) {
    if (begin_ == MAP_FAILED) {
        std::abort();
    }
}

AddressRange::~AddressRange() { munmap(begin_, bytes_); }

AccessRange Region::pages() const {
    const AccessRange bytes_of = range();
    return {bytes_of.begin / kPageBytes * kPageBytes, whole_pages(bytes_of.end)};
}

Region& MemoryTable::allocate(MemoryKind kind, std::uint64_t bytes) {
    auto region = std::make_unique<Region>();
    const std::uint64_t held = whole_pages(bytes);
    region->kind = kind;
    region->bytes = bytes;
    region->owned = {static_cast<std::uint8_t*>(std::aligned_alloc(kPageBytes, held)), free_bytes};
    if (region->owned == nullptr) {
        std::abort();
    }
    std::memset(region->owned.get(), kUnwritten, held);
    region->content = region->owned.get();
    place(*region);
    return add(std::move(region));
}

void MemoryTable::place(Region& region) {
    const std::uint64_t held = round_up(region.bytes, kDeviceAlignment);
    if (region.kind != MemoryKind::device || !packs_) {
        region.reserved = std::make_shared<AddressRange>(held + kPageBytes);
        region.address = region.reserved->begin();
        return;
    }
    if (packed_end_ - packed_begin_ < held) {
        const std::uint64_t bytes = std::max(held, kPackedBytes);
        packed_ = std::make_shared<AddressRange>(bytes);
        packed_begin_ = packed_->begin();
        packed_end_ = packed_begin_ + bytes;
    }
    region.reserved = packed_;
    region.address = std::exchange(packed_begin_, packed_begin_ + held);
}

Result<Region*> MemoryTable::register_host(void* address, std::uint64_t bytes) {
    const auto begin = reinterpret_cast<std::uint64_t>(address);
    if (bytes == 0 || bytes > UINT64_MAX - kPageBytes - begin) {
        return Status(Code::invalid, "a range without bytes, or around the end of memory");
    }
    auto region = std::make_unique<Region>();
    region->kind = MemoryKind::registered;
    region->bytes = bytes;
    region->content = static_cast<std::uint8_t*>(address);
    const AccessRange pages = region->pages();
    if (!is_mapped(pages)) {
        return Status(Code::invalid, "there is no memory");
    }
    // The last one that begins before this one's end ends last too.
    const auto behind = by_content_.lower_bound(pages.end);
    if (behind != by_content_.begin() && std::prev(behind)->second->pages().end > pages.begin) {
        return Status(Code::unavailable, "registered already");
    }
    region->reserved = std::make_shared<AddressRange>(pages.end - pages.begin + kPageBytes);
    region->address = region->reserved->begin() + begin % kPageBytes;
    return &add(std::move(region));
}

Region& MemoryTable::add(std::unique_ptr<Region> region) {
    Region& added = *region;
    added.number = regions_.size() + 1;
    by_address_[added.address] = &added;
    by_content_[reinterpret_cast<std::uint64_t>(added.content)] = &added;
    device_bytes_ += added.kind == MemoryKind::device ? added.bytes : 0;
    regions_.push_back(std::move(region));
    return added;
}

Region* MemoryTable::lookup_base(MemoryKind kind, std::uint64_t address) {
    const Index& index = kind == MemoryKind::device ? by_address_ : by_content_;
    const auto at = index.find(address);
    return at != index.end() && at->second->kind == kind && !at->second->is_gone ? at->second : nullptr;
}

void MemoryTable::retire(Region& region) {
    region.is_gone = true;
    by_content_.erase(reinterpret_cast<std::uint64_t>(region.content));
    device_bytes_ -= region.kind == MemoryKind::device ? region.bytes : 0;
}

MemoryTable::Spot MemoryTable::find_spot(std::uint64_t address) const {
    if (const auto behind = by_address_.upper_bound(address); behind != by_address_.begin()) {
        Region* const before = std::prev(behind)->second;
        if (address - before->address < before->bytes) {
            return {before, address - before->address, false};
        }
    }
    if (const auto behind = by_content_.upper_bound(address); behind != by_content_.begin()) {
        Region* const before = std::prev(behind)->second;
        if (before->kind != MemoryKind::device && address < before->range().end) {
            return {before, address - before->range().begin, true};
        }
    }
    return {};
}

Result<Place> MemoryTable::locate(std::uint64_t address, std::uint64_t length, bool is_kernel) const {
    const auto [region, offset, is_by_host] = find_spot(address);
    if (region == nullptr) {
        return Status(Code::invalid, hex(address) + ", which is no memory that the driver knows");
    }
    if (is_by_host && is_kernel) {
        return Status(Code::invalid, hex(address) + ", which is the host's address of " + name_of(region->kind) +
                                         " and not the device's");
    }
    const std::uint64_t begin = region->range().begin + offset;
    const auto where = [&] { return describe(*region, {begin, begin + length}); };
    if (region->is_gone) {
        return Status(Code::invalid, where() + ", which is gone");
    }
    if (length > region->bytes - offset) {
        return Status(Code::invalid, where() + ", which ends at " + hex(region->bytes));
    }
    return Place{region, region->content + offset};
}

bool MemoryTable::crosses_border(std::uint64_t address, std::uint64_t length) const {
    const auto [region, offset, is_by_host] = find_spot(address);
    if (region == nullptr || region->is_gone || length <= region->bytes - offset) {
        return false;
    }
    const Region* const next = find_spot(address + (region->bytes - offset)).region;
    return next != nullptr && !next->is_gone;
}

const Region* MemoryTable::lookup_content(std::uint64_t content) const {
    const auto behind = by_content_.upper_bound(content);
    if (behind == by_content_.begin()) {
        return nullptr;
    }
    const Region* const region = std::prev(behind)->second;
    return content < region->range().end ? region : nullptr;
}

std::uint64_t MemoryTable::live(MemoryKind kind) const {
    return static_cast<std::uint64_t>(
        std::ranges::count_if(regions_, [&](const auto& region) { return region->kind == kind && !region->is_gone; }));
}

std::string describe(const Region& region, AccessRange content) {
    const std::uint64_t begin = region.range().begin;
    return std::string(name_of(region.kind)) + " " + std::to_string(region.number) + " + " +
           hex(content.begin - begin) + ".." + hex(content.end - begin);
}

}  // namespace kvo::fake

// The memory that the driver knows of. Every region has an address for the device, where nothing is mapped, and the
// bytes themselves elsewhere: a host that follows a device's address crashes, here as on a real machine.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/status.hpp"
#include "fake_cuda/happens_before.hpp"

namespace kvo::fake {

enum class MemoryKind : std::uint8_t { device, pinned, registered };

// Addresses that no access may use.
class AddressRange {
public:
    explicit AddressRange(std::uint64_t bytes);
    ~AddressRange();
    AddressRange(const AddressRange&) = delete;
    AddressRange& operator=(const AddressRange&) = delete;

    std::uint64_t begin() const { return reinterpret_cast<std::uint64_t>(begin_); }

private:
    void* begin_;
    std::uint64_t bytes_;
};

struct Region {
    MemoryKind kind = MemoryKind::device;
    std::uint64_t number = 0;   // for reports
    std::uint64_t address = 0;  // the device's
    std::uint64_t bytes = 0;
    std::uint8_t* content = nullptr;
    bool is_gone = false;

    AccessRange range() const {
        const auto begin = reinterpret_cast<std::uint64_t>(content);
        return {begin, begin + bytes};
    }
    // The pages that a registration locks: a page belongs to one registration or pinned allocation at most.
    AccessRange pages() const;

    std::shared_ptr<AddressRange> reserved;
    std::unique_ptr<std::uint8_t[], void (*)(std::uint8_t*)> owned{nullptr, nullptr};
};

// Part of a region.
struct Place {
    const Region* region = nullptr;
    std::uint8_t* at = nullptr;
};

class MemoryTable {
public:
    // `packs` device memory: what is allocated in a row lies in a row where its size allows it, as the real driver does
    // it; else between any two allocations there is a gap.
    explicit MemoryTable(bool packs = false) : packs_(packs) {}

    Region& allocate(MemoryKind kind, std::uint64_t bytes);
    // Code::invalid: no such memory. Code::unavailable: a page of it is registered already.
    Result<Region*> register_host(void* address, std::uint64_t bytes);
    // Returns the region that begins at an address as it was given out (the host's for host memory). Null: there is
    // none, or it is gone.
    Region* lookup_base(MemoryKind kind, std::uint64_t address);
    // Its bytes stay until the table ends: what still uses them must find nothing but them there.
    void retire(Region& region);

    // Returns the place that `address` stands for in a copy (any known address) or in a kernel (the device's only).
    Result<Place> locate(std::uint64_t address, std::uint64_t length, bool is_kernel) const;
    // Whether these bytes begin in one region and run on in the one right behind it, which no operation may do.
    bool crosses_border(std::uint64_t address, std::uint64_t length) const;
    // Null: no known memory begins before it that reaches to it.
    const Region* lookup_content(std::uint64_t content) const;

    std::uint64_t live(MemoryKind kind) const;
    std::uint64_t device_bytes() const { return device_bytes_; }

private:
    using Index = std::map<std::uint64_t, Region*>;

    // A byte of a region; no region: none is known there.
    struct Spot {
        Region* region = nullptr;
        std::uint64_t offset = 0;
        bool is_by_host = false;  // found by the host's address and not by the device's
    };

    Spot find_spot(std::uint64_t address) const;
    Region& add(std::unique_ptr<Region> region);
    void place(Region& region);

    bool packs_;
    std::shared_ptr<AddressRange> packed_;  // where the next one is placed
    std::uint64_t packed_begin_ = 0;
    std::uint64_t packed_end_ = 0;
    std::vector<std::unique_ptr<Region>> regions_;
    Index by_address_;  // all there ever were
    Index by_content_;  // live ones
    std::uint64_t device_bytes_ = 0;
};

std::string hex(std::uint64_t number);
// Such as "device memory 3 + 0x100..0x140".
std::string describe(const Region& region, AccessRange content);

}  // namespace kvo::fake

// Memory and copies.
#include <array>

#include "fake_cuda/call.hpp"
#include "fake_cuda/entry_points.hpp"

namespace kvo::fake {
namespace {

// The driver's own layout: CUmemcpyAttributes.
struct CopyAttributes {
    int source_access_order;
    int source_location_type;
    int source_location;
    int destination_location_type;
    int destination_location;
    unsigned flags;
};
constexpr int kOrderStream = 1;
constexpr int kOrderAny = 3;
// Batches far larger have crashed real drivers.
constexpr std::size_t kMaxBatch = 16384;

int allocate_device(std::uint64_t* address, std::size_t bytes) {
    Call call("cuMemAlloc");
    if (call.fails()) {
        return call.status();
    }
    const MemoryTable& memory = call.driver.check().memory();
    if (bytes == 0) {
        return kInvalidValue;
    }
    if (bytes > call.driver.settings().device_bytes - memory.device_bytes()) {
        return kOutOfMemory;
    }
    *address = call.driver.check().allocate(MemoryKind::device, bytes).address;
    return 0;
}

int free_region(const char* function, MemoryKind kind, std::uint64_t address, int status_if_unknown) {
    Call call(function);
    if (call.is_refused()) {
        return call.status();
    }
    Region* const region = call.driver.check().memory().lookup_base(kind, address);
    if (region == nullptr) {
        return call.refuse((std::string(function) + " of what is not there to be given back").c_str(),
                           status_if_unknown);
    }
    call.driver.give_back(*region, function);
    return call.status();
}

int free_device(std::uint64_t address) { return free_region("cuMemFree", MemoryKind::device, address, kInvalidValue); }

int allocate_host(void** address, std::size_t bytes) {
    Call call("cuMemAllocHost");
    if (call.fails()) {
        return call.status();
    }
    if (bytes == 0) {
        return kInvalidValue;
    }
    *address = call.driver.check().allocate(MemoryKind::pinned, bytes).content;
    return 0;
}

int free_host(void* address) {
    return free_region("cuMemFreeHost", MemoryKind::pinned, reinterpret_cast<std::uint64_t>(address), kInvalidValue);
}

int register_host(void* address, std::size_t bytes, unsigned) {
    Call call("cuMemHostRegister");
    if (call.fails()) {
        return call.status();
    }
    const Result<Region*> region = call.driver.check().memory().register_host(address, bytes);
    if (!region.ok()) {
        return region.fault().code() == Code::invalid ? kInvalidValue : kAlreadyRegistered;
    }
    return 0;
}

int unregister_host(void* address) {
    return free_region("cuMemHostUnregister", MemoryKind::registered, reinterpret_cast<std::uint64_t>(address),
                       kNotRegistered);
}

int host_device_address(std::uint64_t* device_address, void* address, unsigned flags) {
    Call call("cuMemHostGetDevicePointer");
    if (call.fails()) {
        return call.status();
    }
    const Region* const region = call.driver.check().memory().lookup_content(reinterpret_cast<std::uint64_t>(address));
    if (region == nullptr || region->kind == MemoryKind::device || flags != 0) {
        return kInvalidValue;
    }
    *device_address = region->address + (reinterpret_cast<std::uint64_t>(address) - region->range().begin);
    return 0;
}

// Known when the copy is asked for, as the driver looks both ends up; what runs out of all memory is found when it
// runs.
bool crosses_border(const Driver& driver, const Move& move) {
    const MemoryTable& memory = driver.check().memory();
    return memory.crosses_border(move.source, move.length) || memory.crosses_border(move.destination, move.length);
}

int copy_async(std::uint64_t destination, std::uint64_t source, std::size_t bytes, void* stream) {
    Call call("cuMemcpyAsync");
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    if (queue == nullptr) {
        return call.refuse("cuMemcpyAsync on what is no stream", kInvalidHandle);
    }
    const Move move{destination, source, bytes};
    if (crosses_border(call.driver, move)) {
        return kInvalidValue;
    }
    return call.driver.submit(*queue, "cuMemcpyAsync", Transfer{{move}, true}, call.later());
}

// Every entry with the same attributes: more is not needed here.
int copy_batch(const char* function, std::uint64_t* destinations, std::uint64_t* sources, std::size_t* sizes,
               std::size_t count, const CopyAttributes* attributes, const std::size_t* attribute_starts,
               std::size_t attribute_count, std::size_t* failed, void* stream) {
    Call call(function);
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    if (queue == nullptr) {
        return call.refuse("cuMemcpyBatchAsync on what is no stream", kInvalidHandle);
    }
    if (count > kMaxBatch) {
        return call.refuse("cuMemcpyBatchAsync with a batch that drivers have crashed on", kInvalidValue);
    }
    if (count == 0 || attribute_count != 1 || attribute_starts[0] != 0 ||
        attributes->source_access_order < kOrderStream || attributes->source_access_order > kOrderAny) {
        return kInvalidValue;
    }
    Transfer transfer;
    transfer.reads_in_stream_order = attributes->source_access_order == kOrderStream;
    for (std::size_t i = 0; i < count; ++i) {
        const Move move{destinations[i], sources[i], sizes[i]};
        if (move.length == 0 || crosses_border(call.driver, move)) {
            *failed = i;
            return kInvalidValue;
        }
        transfer.moves.push_back(move);
    }
    return call.driver.submit(*queue, function, std::move(transfer), call.later());
}

int copy_batch_v12080(std::uint64_t* destinations, std::uint64_t* sources, std::size_t* sizes, std::size_t count,
                      CopyAttributes* attributes, std::size_t* attribute_starts, std::size_t attribute_count,
                      std::size_t* failed, void* stream) {
    *failed = SIZE_MAX;
    return copy_batch("cuMemcpyBatchAsync", destinations, sources, sizes, count, attributes, attribute_starts,
                      attribute_count, failed, stream);
}

// Its caller is not told which copy it was.
int copy_batch_v13000(std::uint64_t* destinations, std::uint64_t* sources, std::size_t* sizes, std::size_t count,
                      CopyAttributes* attributes, std::size_t* attribute_starts, std::size_t attribute_count,
                      void* stream) {
    std::size_t failed = SIZE_MAX;
    return copy_batch("cuMemcpyBatchAsync", destinations, sources, sizes, count, attributes, attribute_starts,
                      attribute_count, &failed, stream);
}

}  // namespace

std::span<const EntryPoint> memory_entry_points() {
    static const std::array points = {
        EntryPoint{"cuMemAlloc", 3020, address_of(allocate_device)},
        EntryPoint{"cuMemFree", 3020, address_of(free_device)},
        EntryPoint{"cuMemAllocHost", 3020, address_of(allocate_host)},
        EntryPoint{"cuMemFreeHost", 2000, address_of(free_host)},
        EntryPoint{"cuMemHostRegister", 6050, address_of(register_host)},
        EntryPoint{"cuMemHostUnregister", 4000, address_of(unregister_host)},
        EntryPoint{"cuMemHostGetDevicePointer", 3020, address_of(host_device_address)},
        EntryPoint{"cuMemcpyAsync", 4000, address_of(copy_async)},
        EntryPoint{"cuMemcpyBatchAsync", 12080, address_of(copy_batch_v12080)},
        EntryPoint{"cuMemcpyBatchAsync", 13000, address_of(copy_batch_v13000)},
    };
    return points;
}

}  // namespace kvo::fake

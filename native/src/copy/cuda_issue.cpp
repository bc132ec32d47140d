#include "copy/cuda_issue.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "copy/copy_runs.hpp"

namespace kvo {
namespace {

// Number of bytes from which on a whole thread block shares a run.
constexpr std::uint64_t kLongRunBytes = 4096;
constexpr std::uint32_t kShortRunTeam = 32;

}  // namespace

CudaStatus CudaIssue::issue(const CudaJob& job, const CopyPart& part, const CudaPlace& place, const char*& function) {
    CudaStatus status = kCudaSuccess;
    const auto call = [&](const char* name, auto driver, auto... arguments) {
        if (status == kCudaSuccess) {
            function = name;
            status = driver(arguments...);
        }
    };
    const auto transfer = [&] {
        status = status == kCudaSuccess ? issue_transfers(job.plan->direction, part.transfers, function) : status;
    };
    const auto fetch = [&] {
        status = status == kCudaSuccess ? issue_fetch(job.plan->direction, part.kernel, place, function) : status;
    };
    const auto launch = [&] { status = status == kCudaSuccess ? issue_kernel(part.kernel, place, function) : status; };
    const auto cross = [&](CudaStream from, CudaStream to) {
        call("cuEventRecord", api_.cuEventRecord, place.crossed, from);
        call("cuStreamWaitEvent", api_.cuStreamWaitEvent, to, place.crossed, 0u);
    };

    const bool is_save = job.plan->direction == CopyDirection::save;
    if (job.uses_kernels()) {
        fetch();
    }
    if (place.staging != nullptr && place.staging->last != nullptr) {
        call("cuStreamWaitEvent", api_.cuStreamWaitEvent, is_save ? device_.kernels() : device_.transfers(),
             place.staging->last->ended, 0u);
    }
    if (job.way == CopyWay::batch) {
        transfer();
    } else if (job.way == CopyWay::mapped) {
        launch();
    } else if (is_save) {
        launch();
        cross(device_.kernels(), device_.transfers());
        transfer();
    } else {
        transfer();
        cross(device_.transfers(), device_.kernels());
        launch();
    }
    call("cuEventRecord", api_.cuEventRecord, place.ended, last_stream(job));
    return status;
}

CudaStatus CudaIssue::issue_transfers(CopyDirection direction, std::span<const PartEntry> entries,
                                      const char*& function) {
    const bool is_save = direction == CopyDirection::save;
    while (has_batches_ && !entries.empty()) {
        const std::size_t count = std::min<std::size_t>(entries.size(), ground_.settings.batch_entries);
        std::vector<CudaAddress> devices(count);
        std::vector<CudaAddress> others(count);
        std::vector<std::size_t> lengths(count);
        for (std::size_t i = 0; i < count; ++i) {
            devices[i] = entries[i].device;
            others[i] = entries[i].other;
            lengths[i] = entries[i].length;
        }
        CudaCopyAttributes attributes;
        std::size_t start = 0;
        std::size_t failed = 0;
        function = "cuMemcpyBatchAsync";
        const CudaStatus status =
            api_.cuMemcpyBatchAsync(is_save ? others.data() : devices.data(), is_save ? devices.data() : others.data(),
                                    lengths.data(), count, &attributes, &start, 1, &failed, device_.transfers());
        if (status == kCudaNotSupported) {
            has_batches_ = false;  // not of this device; from here on one by one
        } else if (status != kCudaSuccess) {
            return status;
        } else {
            entries = entries.subspan(count);
        }
    }
    return issue_one_by_one(direction, entries, function);
}

CudaStatus CudaIssue::issue_one_by_one(CopyDirection direction, std::span<const PartEntry> entries,
                                       const char*& function) {
    const bool is_save = direction == CopyDirection::save;
    for (const auto& [device, other, length] : entries) {
        function = "cuMemcpyAsync";
        const CudaStatus status =
            api_.cuMemcpyAsync(is_save ? other : device, is_save ? device : other, length, device_.transfers());
        if (status != kCudaSuccess) {
            return status;
        }
    }
    return kCudaSuccess;
}

CudaStatus CudaIssue::issue_fetch(CopyDirection direction, const std::vector<PartEntry>& entries,
                                  const CudaPlace& place, const char*& function) {
    const std::size_t count = entries.size();
    const bool is_save = direction == CopyDirection::save;
    const std::uint64_t offset = place.lists_offset;
    auto* const sources = reinterpret_cast<std::uint64_t*>(device_.host_lists() + offset);
    std::uint64_t* const destinations = sources + count;
    std::uint64_t* const lengths = destinations + count;
    touch_host(sources, count * kListEntryBytes, true);
    for (std::size_t i = 0; i < count; ++i) {
        sources[i] = is_save ? entries[i].device : entries[i].other;
        destinations[i] = is_save ? entries[i].other : entries[i].device;
        lengths[i] = entries[i].length;
    }
    std::array<std::uint64_t, 3> parameters = {device_.mapped_lists() + offset, device_.device_lists() + offset,
                                               count * kListEntryBytes};
    std::array<void*, 3> places = {&parameters[0], &parameters[1], &parameters[2]};
    return launch(device_.fetch(), places.data(), function);
}

CudaStatus CudaIssue::issue_kernel(const std::vector<PartEntry>& entries, const CudaPlace& place,
                                   const char*& function) {
    const std::size_t count = entries.size();
    std::uint64_t bytes = 0;
    for (const PartEntry& entry : entries) {
        bytes += entry.length;
    }
    const CudaAddress sources = device_.device_lists() + place.lists_offset;
    const std::uint64_t each = count * sizeof(std::uint64_t);
    // CopyRuns as the kernel takes it: its pointers are the device's.
    std::array<std::uint64_t, 4> runs = {sources, sources + each, sources + 2 * each, count};
    static_assert(sizeof runs == sizeof(CopyRuns));
    const std::uint32_t threads = ground_.settings.kernel_threads;
    std::uint32_t team_size = bytes / count >= kLongRunBytes ? threads : kShortRunTeam;
    std::array<void*, 2> parameters = {runs.data(), &team_size};
    return launch(device_.copy_runs(), parameters.data(), function);
}

CudaStatus CudaIssue::launch(CudaFunction kernel, void** parameters, const char*& function) {
    function = "cuLaunchKernel";
    return api_.cuLaunchKernel(kernel, ground_.kernel_blocks, 1, 1, ground_.settings.kernel_threads, 1, 1, 0,
                               device_.kernels(), parameters, nullptr);
}

void CudaIssue::copy_bounced(const CudaJob& job, const CudaPlace& place) const {
    const bool is_save = job.plan->direction == CopyDirection::save;
    job.runs->visit_slots(place.begin, place.end, [&](const SlotRun& run) {
        auto* const slot = reinterpret_cast<std::uint8_t*>(run.slot);
        std::uint8_t* const bounce = place.bounce->host + (run.position - place.begin);
        std::uint8_t* const from = is_save ? bounce : slot;
        std::uint8_t* const to = is_save ? slot : bounce;
        touch_host(from, run.length, false);
        touch_host(to, run.length, true);
        std::memcpy(to, from, run.length);
    });
}

void CudaIssue::touch_host(const void* address, std::uint64_t length, bool is_written) const {
    if (ground_.settings.on_host_access) {
        ground_.settings.on_host_access(address, length, is_written);
    }
}

}  // namespace kvo

#include "disk/device_recovery.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "shim/system_fault.hpp"

namespace kvo {
namespace {

constexpr std::uint32_t kUnreadableLimit = 8;  // segments, until the device is taken for gone

}  // namespace

Status DeviceRecovery::run() {
    const Instant begun = terms_.now();
    const Result<std::vector<std::uint32_t>> numbers = files_.list();
    if (!numbers.ok()) {
        return numbers.fault();
    }
    std::vector<std::pair<std::uint32_t, FoundSegment>> found;
    std::vector<std::uint32_t> unreadable;
    std::uint32_t dropped = 0;
    for (const std::uint32_t number : numbers.value()) {
        if (const Status opened = files_.open_file(number); !opened.ok()) {
            if (opened.code() != Code::unavailable) {
                return opened;
            }
            ++dropped;
            if (const Status removed = files_.remove_file(number); !removed.ok()) {
                return removed;
            }
            continue;
        }
        int error = 0;
        auto one = io_.find(number, error);
        if (error != 0 && !one) {
            unreadable.push_back(number);
        }
        const bool has_gone = error == ETIMEDOUT || error == ENOMEM || unreadable.size() == kUnreadableLimit;
        if (has_gone || (!unreadable.empty() && unreadable.size() == numbers.value().size())) {
            return {Code::failed, "disk folder " + terms_.path +
                                      ": reads fail: " + system_fault(segment_file_name(number), error).message()};
        }
        if (one && !one->entries.empty()) {
            found.emplace_back(number, std::move(*one));
        } else {
            dropped += one ? 0 : 1;
        }
    }
    // Adopts the oldest segment first, so that a later record of the same key wins.
    std::ranges::sort(found, {}, [](const auto& one) { return one.second.life.generation; });
    for (auto& [number, segment] : found) {
        adopt(number, std::move(segment));
    }
    for (const std::uint32_t number : unreadable) {
        // Otherwise records that are removed meanwhile could be back once the file is readable again. Removing it may
        // fail now.
        static_cast<void>(files_.remove_file(number));
    }
    counts_.dropped_segments += dropped;
    counts_.recovery_us =
        static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(terms_.now() - begun).count());
    return {};
}

void DeviceRecovery::adopt(std::uint32_t number, FoundSegment found) {
    files_.go_on_with_life(number, found.life);
    SegmentFile& segment = files_[number];
    // One that could not be read everywhere gets none: there may be more in it.
    segment.has_footer = found.has_footer || (found.is_whole && io_.write_footer(number, found));
    ++counts_.recovered_segments;
    counts_.scanned_segments += found.has_footer ? 0 : 1;
    const std::lock_guard hold(index_.lock);
    for (const FooterEntry& entry : found.entries) {
        if (entry.flag == RecordFlag::removal) {
            ++segment.removals;
            index_.index.erase(mark_of(entry.key));
        } else {
            ++counts_.recovered_records;
            index_.index.put(mark_of(entry.key), place_of(number, entry));
        }
    }
}

}  // namespace kvo

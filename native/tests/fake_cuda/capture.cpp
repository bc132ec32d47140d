#include "fake_cuda/capture.hpp"

#include <algorithm>
#include <array>
#include <string_view>

namespace kvo::fake {
namespace {

// CUDA names cudaMalloc and cudaEventQuery as examples and has no list. These take or give memory, load or unload code,
// or ask how far the device is. No thread that a capture may forbid it to should make such a call.
constexpr std::array<std::string_view, 12> kUnsafe = {
    "cuMemAlloc",        "cuMemFree",           "cuMemAllocHost", "cuMemFreeHost",
    "cuMemHostRegister", "cuMemHostUnregister", "cuEventQuery",   "cuEventSynchronize",
    "cuStreamQuery",     "cuStreamSynchronize", "cuModuleUnload", "cuModuleLoadData",
};

}  // namespace

std::shared_ptr<Capture> CaptureTable::begin() {
    return under_way_.emplace_back(std::make_shared<Capture>(Capture{std::this_thread::get_id()}));
}

void CaptureTable::end(Capture& capture) {
    capture.is_under_way = false;
    std::erase_if(under_way_, [](const auto& other) { return !other->is_under_way; });
}

bool CaptureTable::refuse(const char* function, CaptureMode mode) {
    const bool is_forbidden = std::ranges::any_of(under_way_, [&](const auto& capture) {
        return mode == CaptureMode::global ||
               (mode == CaptureMode::thread_local_ && capture->owner == std::this_thread::get_id());
    });
    if (!is_forbidden || std::ranges::find(kUnsafe, function) == kUnsafe.end()) {
        return false;
    }
    for (const auto& capture : under_way_) {
        capture->is_broken = true;
    }
    return true;
}

}  // namespace kvo::fake

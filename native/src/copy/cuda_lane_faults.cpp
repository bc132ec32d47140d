#include "copy/cuda_lane_faults.hpp"

#include "copy/cuda_codes.hpp"

namespace kvo {
namespace {

constexpr int kStrangeAnswers = 8;

}  // namespace

void CudaGround::lose(const char* function, CudaStatus status) {
    is_lost.store(true);
    const std::string why = std::string("the device is lost, ") + function + ": " + api.driver.describe(status);
    {
        const std::lock_guard lock(mutex);
        if (loss.empty()) {
            loss = why;
        }
    }
    wake_lanes();
}

void CudaLaneFaults::doubt(const char* function, CudaStatus status) {
    const auto now = std::chrono::steady_clock::now();
    if (is_final(status)) {
        ground_.lose(function, status);
    } else if (status == kCudaNotReady || is_capture_refusal(status)) {
        strange_.reset();
    } else {
        strange_ = strange_.value_or(Strange{now});
        const bool is_long = now - strange_->since > ground_.settings.strange_answers;
        if (++strange_->count > kStrangeAnswers && is_long) {
            ground_.lose(function, status);
        }
    }
}

CudaLaneFaults::Streams CudaLaneFaults::query_streams(const CudaLaneDevice& device) {
    Streams found = Streams::empty;
    for (const CudaStream stream : {device.kernels(), device.transfers()}) {
        const CudaStatus status = ground_.api.cuStreamQuery(stream);
        if (status == kCudaSuccess) {
            continue;
        }
        doubt("cuStreamQuery", status);
        if (!is_final(status)) {
            return Streams::running;
        }
        found = Streams::ended;
    }
    return found;
}

}  // namespace kvo

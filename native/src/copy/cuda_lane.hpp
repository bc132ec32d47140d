// One direction of a CUDA engine: two streams, buffers, and the thread that feeds and watches them.
//
//     queue ──► current ──► parts with the device ──► running ──► digesting ──► tickets
//
// The thread waits inside no call. Parts follow each other on the device by events alone; a plan ends, and what the
// host shares with the device is used again, when the host has seen the part's event. It asks for that event every few
// microseconds, but sleeps while the plan in front waits for the model: a watch wakes it. After a call that failed the
// lane hands out nothing until both streams are empty; then what failed ends and the rest goes on.
#pragma once

#include <future>
#include <memory>
#include <thread>

#include "copy/cuda_events.hpp"
#include "copy/cuda_job.hpp"
#include "copy/cuda_lane_device.hpp"
#include "copy/cuda_lane_flow.hpp"

namespace kvo {

class CudaLane {
public:
    explicit CudaLane(CudaGround& ground)
        : ground_(ground), device_(ground), ends_(ground), flow_(ground, device_, ends_) {}
    // The queue has said that nothing runs, or open() that nothing began.
    ~CudaLane();
    CudaLane(const CudaLane&) = delete;
    CudaLane& operator=(const CudaLane&) = delete;

    // Starts the thread and waits until it has its streams and buffers.
    Status open();
    CudaLaneQueue& queue() noexcept { return queue_; }

private:
    // The thread's.
    void run(std::promise<Status> opened);
    Status open_device();
    void close_device();
    bool step();
    bool may_sleep();
    bool work();
    bool take_job();
    bool poll_loss();
    void poll_close();
    void end_queue(const char* why);
    bool is_idle() const { return flow_.is_idle() && ends_.is_idle(); }

    CudaGround& ground_;
    CudaLaneQueue queue_;
    CudaLaneDevice device_;
    CudaLaneEnds ends_;
    CudaLaneFlow flow_;
    std::unique_ptr<CudaWatch> watch_;
    std::thread thread_;
};

}  // namespace kvo

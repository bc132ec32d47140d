// Streams and events.
#include <array>
#include <utility>

#include "fake_cuda/call.hpp"
#include "fake_cuda/entry_points.hpp"

namespace kvo::fake {
namespace {

// Captured work runs later in a graph, or never, so a call that asks how far it is breaks the capture.
int refuse_captured(const std::shared_ptr<Capture>& capture, int status) {
    capture->is_broken |= capture->is_under_way;
    return status;
}

int stream_create(void** stream, unsigned flags, int priority) {
    constexpr unsigned kNonBlocking = 1;
    Call call("cuStreamCreateWithPriority");
    if (call.fails()) {
        return call.status();
    }
    if (flags != kNonBlocking) {
        // Such a stream and the legacy stream would wait for each other, which is not modelled here and which no user
        // wants.
        return call.refuse("a stream that is not CU_STREAM_NON_BLOCKING", kInvalidValue);
    }
    *stream = call.driver.open_stream(priority);
    return 0;
}

int stream_destroy(void* stream) {
    Call call("cuStreamDestroy");
    if (call.driver.stream(stream) == nullptr) {
        return call.refuse("cuStreamDestroy of what is no stream", kInvalidHandle);
    }
    call.driver.close_stream(stream);
    return call.status();
}

int stream_query(void* stream) {
    Call call("cuStreamQuery");
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    if (queue == nullptr) {
        return call.refuse("cuStreamQuery of what is no stream", kInvalidHandle);
    }
    if (queue->capture() != nullptr) {
        return refuse_captured(queue->capture(), kCaptureUnsupported);
    }
    if (queue->completed() < queue->submitted()) {
        return kNotReady;
    }
    call.driver.see(queue->clock());
    return 0;
}

int stream_synchronize(void* stream) {
    Call call("cuStreamSynchronize");
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    if (queue == nullptr) {
        return call.refuse("cuStreamSynchronize of what is no stream", kInvalidHandle);
    }
    if (queue->capture() != nullptr) {
        return refuse_captured(queue->capture(), kCaptureUnsupported);
    }
    const VectorClock clock = queue->clock();
    const std::uint64_t submitted = queue->submitted();
    if (const int status = call.wait("cuStreamSynchronize of a stream that gets no further",
                                     [&] { return queue->completed() >= submitted; });
        status != 0) {
        return status;
    }
    call.driver.see(clock);
    return 0;
}

int stream_wait_event(void* stream, void* event, unsigned flags) {
    Call call("cuStreamWaitEvent");
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    auto* const awaited = call.driver.event(event);
    if (queue == nullptr || awaited == nullptr || flags != 0) {
        return call.refuse("cuStreamWaitEvent of what is no stream or event", kInvalidHandle);
    }
    return call.driver.wait(*queue, *awaited);
}

int stream_is_capturing(void* stream, int* capture) {
    Call call("cuStreamIsCapturing");
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    if (queue == nullptr) {
        return call.refuse("cuStreamIsCapturing of what is no stream", kInvalidHandle);
    }
    *capture = queue->capture() == nullptr ? 0 : queue->capture()->is_broken ? 2 : 1;
    return 0;
}

int exchange_capture_mode(int* mode) {
    Call call("cuThreadExchangeStreamCaptureMode", Needs::nothing);
    if (call.fails()) {
        return call.status();
    }
    if (*mode < 0 || *mode > static_cast<int>(CaptureMode::relaxed)) {
        return kInvalidValue;
    }
    CaptureMode& own = call.driver.host().capture_mode;
    *mode = static_cast<int>(std::exchange(own, static_cast<CaptureMode>(*mode)));
    return 0;
}

int event_create(void** event, unsigned flags) {
    constexpr unsigned kBlockingSync = 1;
    Call call("cuEventCreate");
    if (call.fails()) {
        return call.status();
    }
    *event = call.driver.open_event((flags & kBlockingSync) != 0);
    return 0;
}

int event_destroy(void* event) {
    Call call("cuEventDestroy");
    if (call.driver.event(event) == nullptr) {
        return call.refuse("cuEventDestroy of what is no event", kInvalidHandle);
    }
    call.driver.close_event(event);
    return call.status();
}

int event_record(void* event, void* stream) {
    Call call("cuEventRecord");
    if (call.fails()) {
        return call.status();
    }
    Stream* const queue = call.driver.stream(stream);
    auto* const recorded = call.driver.event(event);
    if (queue == nullptr || recorded == nullptr) {
        return call.refuse("cuEventRecord of what is no stream or event", kInvalidHandle);
    }
    return call.driver.record(*queue, *recorded);
}

int event_query(void* event) {
    Call call("cuEventQuery");
    if (call.fails()) {
        return call.status();
    }
    auto* const queried = call.driver.event(event);
    if (queried == nullptr) {
        return call.refuse("cuEventQuery of what is no event", kInvalidHandle);
    }
    if ((*queried)->capture != nullptr) {
        return refuse_captured((*queried)->capture, kCapturedEvent);
    }
    if ((*queried)->completed < (*queried)->records) {
        return kNotReady;
    }
    call.driver.see((*queried)->clock);
    return 0;
}

int event_synchronize(void* event) {
    Call call("cuEventSynchronize");
    if (call.fails()) {
        return call.status();
    }
    auto* const handle = call.driver.event(event);
    if (handle == nullptr) {
        return call.refuse("cuEventSynchronize of what is no event", kInvalidHandle);
    }
    const std::shared_ptr<Event> awaited = *handle;
    if (!awaited->lets_sleep) {
        return call.refuse("cuEventSynchronize of an event that is not CU_EVENT_BLOCKING_SYNC, which spins",
                           kInvalidValue);
    }
    if (awaited->capture != nullptr) {
        return refuse_captured(awaited->capture, kCapturedEvent);
    }
    const VectorClock clock = awaited->clock;
    const std::uint64_t records = awaited->records;
    if (const int status = call.wait("cuEventSynchronize of an event that does not come",
                                     [&] { return awaited->completed >= records; });
        status != 0) {
        return status;
    }
    call.driver.see(clock);
    return 0;
}

}  // namespace

std::span<const EntryPoint> stream_entry_points() {
    static const std::array points = {
        EntryPoint{"cuStreamCreateWithPriority", 5050, address_of(stream_create)},
        EntryPoint{"cuStreamDestroy", 4000, address_of(stream_destroy)},
        EntryPoint{"cuStreamQuery", 2000, address_of(stream_query)},
        EntryPoint{"cuStreamSynchronize", 2000, address_of(stream_synchronize)},
        EntryPoint{"cuStreamWaitEvent", 3020, address_of(stream_wait_event)},
        EntryPoint{"cuStreamIsCapturing", 10000, address_of(stream_is_capturing)},
        EntryPoint{"cuThreadExchangeStreamCaptureMode", 10010, address_of(exchange_capture_mode)},
        EntryPoint{"cuEventCreate", 2000, address_of(event_create)},
        EntryPoint{"cuEventDestroy", 4000, address_of(event_destroy)},
        EntryPoint{"cuEventRecord", 2000, address_of(event_record)},
        EntryPoint{"cuEventQuery", 2000, address_of(event_query)},
        EntryPoint{"cuEventSynchronize", 2000, address_of(event_synchronize)},
    };
    return points;
}

}  // namespace kvo::fake

// Stream captures, and which calls break them.
//
// What CUDA documents: a call that is "potentially unsafe", as it does something that no capture can observe, is
// refused with 900 in a thread whose mode forbids it, and every capture that it could have concerned is broken. Query
// or wait for a captured stream or event, and the mode does not matter. A broken capture takes nothing in any more
// (901) and ends with 901.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace kvo::fake {

// CUstreamCaptureMode.
enum class CaptureMode : std::uint8_t { global, thread_local_, relaxed };

// Of the global mode, all of them.
struct Capture {
    std::thread::id owner;
    bool is_under_way = true;
    bool is_broken = false;
};

class CaptureTable {
public:
    // Begins a capture by the calling thread.
    std::shared_ptr<Capture> begin();
    void end(Capture& capture);
    // Whether the calling thread, in this mode, may not make this call; then every capture is broken.
    bool refuse(const char* function, CaptureMode mode);

private:
    std::vector<std::shared_ptr<Capture>> under_way_;
};

}  // namespace kvo::fake

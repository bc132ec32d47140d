// How many bytes a device may still be given today.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

#include "io/io_queue.hpp"

namespace kvo {

// A bucket that holds an hour's share and fills at 23 of 24 parts of the daily rate, so that no span of 24 hours sees
// more than a day's bytes. It begins full for a new folder and empty for an existing one, since the former server's
// writes are not known. So a restart does not get around the bound.
class WriteBudget {
public:
    WriteBudget(std::uint64_t daily_bytes, Instant now, bool is_new)  // 0: no bound
        : daily_bytes_(daily_bytes), left_(is_new ? hour() : 0.0), filled_(now) {}

    // Whether a record of so many bytes may be written now.
    bool allows(std::uint64_t bytes, Instant now) {
        fill(now);
        return daily_bytes_ == 0 || static_cast<double>(bytes) <= left_;
    }

    // Charges bytes that are written to the device, including footers and moved records. The balance may become
    // negative.
    void charge(std::uint64_t bytes) { left_ -= static_cast<double>(bytes); }

private:
    static constexpr double kHours = 24.0;

    double hour() const { return static_cast<double>(daily_bytes_) / kHours; }
    void fill(Instant now) {
        const double seconds = std::chrono::duration<double>(now - filled_).count();
        filled_ = now;
        left_ = std::min(hour(), left_ + seconds * hour() * (kHours - 1) / kHours / 3600.0);
    }

    std::uint64_t daily_bytes_;
    double left_;
    Instant filled_;
};

}  // namespace kvo

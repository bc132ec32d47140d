// Records that are kept when their segment goes: read a few at a time, and put again.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "disk/disk_batch.hpp"
#include "io/aligned_memory.hpp"

namespace kvo {

// For the device's thread. Moves by batches of the device's own, through `get` and `put`; one at a time.
class Mover {
public:
    using Give = std::function<void(const BatchPointer&)>;

    Mover(std::vector<FooterEntry> entries, Give get, Give put, Give remove, std::function<Instant()> deadline);

    // Goes on with what has ended. True: all is done, or could not be.
    bool step();
    std::uint64_t moved_bytes() const noexcept { return moved_bytes_; }

private:
    void begin_get();
    void begin_put();

    std::vector<FooterEntry> entries_;
    const Give get_;
    const Give put_;
    const Give remove_;
    const std::function<Instant()> deadline_;
    std::size_t next_ = 0;
    BatchPointer batch_;
    std::shared_ptr<AlignedMemory> memory_;
    std::uint64_t moved_bytes_ = 0;
};

}  // namespace kvo

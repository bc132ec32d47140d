// Whether an operation may touch what it is about to touch: the memory is there, and every other access to it has an
// order to this one. What may not be is reported.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda/happens_before.hpp"
#include "fake_cuda/memory_table.hpp"
#include "fake_cuda/operation.hpp"

namespace kvo::fake {

// One range that an operation touches, in no particular order to its others.
struct Use {
    std::uint64_t address = 0;
    std::uint64_t length = 0;
    AccessKind kind = AccessKind::read;
};

// Under the driver's mutex.
class AccessCheck {
public:
    // Where the bytes are, in the order of `uses`; empty if there was something to report.
    std::vector<std::uint8_t*> admit(const Operation& operation, const std::vector<Use>& uses);
    // Any access to host memory, known to the driver or not; false: it was reported.
    bool check_range(AccessRange range, AccessKind kind, const Accessor& accessor, const VectorClock& known);
    // Adds new memory, which no thread or stream has touched yet.
    Region& allocate(MemoryKind kind, std::uint64_t bytes);

    void report(const std::string& text);
    void keep_reports(bool keeps) { keeps_reports_ = keeps; }
    const std::vector<std::string>& reports() const { return reports_; }
    std::vector<std::string> take_reports() { return std::exchange(reports_, {}); }
    // Anew; reports are kept or not as before.
    void reset(bool packs_memory);

    MemoryTable& memory() { return memory_; }
    const MemoryTable& memory() const { return memory_; }
    AccessHistory& history() { return history_; }

private:
    bool check_parts(const Operation& operation, const std::vector<Use>& uses,
                     const std::vector<std::uint8_t*>& places);
    std::string name_range(AccessRange range) const;

    MemoryTable memory_;
    AccessHistory history_;
    bool keeps_reports_ = false;
    std::vector<std::string> reports_;
};

}  // namespace kvo::fake

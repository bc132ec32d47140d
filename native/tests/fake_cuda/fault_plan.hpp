// Decides which calls fail.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "fake_cuda/fake_control.hpp"
#include "fake_cuda/pace.hpp"

namespace kvo::fake {

class FaultPlan {
public:
    void arm(const Fault& fault, std::uint64_t seed) {
        fault_ = fault;
        calls_ = 0;
        struck_ = 0;
        struck_function_.clear();
        chance_ = Chance(seed);
    }
    const Fault& fault() const { return fault_; }
    std::uint64_t calls() const { return calls_; }
    std::uint64_t struck() const { return struck_; }
    const std::string& struck_function() const { return struck_function_; }

    // Counts a call; whether the fault strikes it.
    bool strike(const char* function) {
        static constexpr std::array<std::string_view, 3> kOperations = {"cuMemcpyAsync", "cuMemcpyBatchAsync",
                                                                        "cuLaunchKernel"};
        if ((!fault_.function.empty() && fault_.function != function) ||
            (fault_.kind == FaultKind::operation_fails &&
             std::ranges::find(kOperations, function) == kOperations.end())) {
            return false;
        }
        ++calls_;
        const bool strikes =
            calls_ == fault_.call || chance_.below(1000) < static_cast<std::uint64_t>(fault_.per_mille);
        if (strikes) {
            ++struck_;
            struck_function_ = function;
        }
        return strikes;
    }

private:
    Fault fault_;
    std::uint64_t calls_ = 0;
    std::uint64_t struck_ = 0;
    std::string struck_function_;
    Chance chance_{1};
};

}  // namespace kvo::fake

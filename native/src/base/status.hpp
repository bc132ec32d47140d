// How a function that can fail says so. No exceptions cross the core's functions except std::bad_alloc.
#pragma once

#include <cerrno>
#include <cstdint>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <variant>

namespace kvo {

enum class Code : std::uint8_t {
    ok,
    invalid,      // the caller broke the contract
    unavailable,  // this machine does not have it
    failed,       // it is there and did not work
};

// Made on hot paths: a good one owns no memory.
class [[nodiscard]] Status {
public:
    Status() noexcept = default;
    Status(Code code, std::string message) noexcept : code_(code), message_(std::move(message)) {}

    bool ok() const noexcept { return code_ == Code::ok; }
    Code code() const noexcept { return code_; }
    const std::string& message() const noexcept { return message_; }  // one line: what and why

private:
    Code code_ = Code::ok;
    std::string message_;
};

// A value, or the Status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
public:
    Result(T value) : content_(std::in_place_index<0>, std::move(value)) {}
    Result(Status fault) : content_(std::in_place_index<1>, std::move(fault)) {}

    bool ok() const noexcept { return content_.index() == 0; }
    const T& value() const { return std::get<0>(content_); }
    T& value() { return std::get<0>(content_); }
    const Status& fault() const { return std::get<1>(content_); }

private:
    std::variant<T, Status> content_;
};

// The Status of a system call that failed.

inline Status system_fault(std::string_view what, int error) {
    return {Code::failed, std::string(what) + ": " + std::generic_category().message(error)};
}

}  // namespace kvo

// The part of the kernel's io_uring interface that we use, defined here because the headers of older systems lack it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvo::uring {

// The same on every architecture we build for.
inline constexpr long kSetup = 425;
inline constexpr long kEnter = 426;
inline constexpr long kRegister = 427;

inline constexpr std::uint8_t kOpFsync = 3;
inline constexpr std::uint8_t kOpRead = 22;
inline constexpr std::uint8_t kOpWrite = 23;
inline constexpr std::uint32_t kFsyncDatasync = 1;

inline constexpr unsigned kRegisterEventfd = 4;
inline constexpr unsigned kRegisterProbe = 8;

inline constexpr std::uint64_t kOffsetSubmissionRing = 0;
inline constexpr std::uint64_t kOffsetCompletionRing = 0x8000000;
inline constexpr std::uint64_t kOffsetEntries = 0x10000000;

struct SubmissionOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, reserved;
    std::uint64_t user_address;
};

struct CompletionOffsets {
    std::uint32_t head, tail, ring_mask, ring_entries, overflow, entries, flags, reserved;
    std::uint64_t user_address;
};

struct Parameters {
    std::uint32_t submission_entries, completion_entries, flags, thread_cpu, thread_idle, features, worker_file;
    std::uint32_t reserved[3];
    SubmissionOffsets submission;
    CompletionOffsets completion;
};
static_assert(sizeof(Parameters) == 120);

struct Submission {
    std::uint8_t operation, flags;
    std::uint16_t priority;
    std::int32_t file;
    std::uint64_t offset, address;
    std::uint32_t length, operation_flags;
    std::uint64_t user_data;
    std::uint64_t reserved[3];
};
static_assert(sizeof(Submission) == 64 && offsetof(Submission, user_data) == 32);

struct Completion {
    std::uint64_t user_data;
    std::int32_t result;
    std::uint32_t flags;
};
static_assert(sizeof(Completion) == 16);

struct ProbedOperation {
    std::uint8_t operation, reserved;
    std::uint16_t flags;
    std::uint32_t reserved_too;
};
inline constexpr std::uint16_t kOperationSupported = 1;

inline constexpr unsigned kProbedOperations = 64;
struct Probe {
    std::uint8_t last_operation, operation_count;
    std::uint16_t reserved;
    std::uint32_t reserved_too[3];
    ProbedOperation operations[kProbedOperations];
};

}  // namespace kvo::uring

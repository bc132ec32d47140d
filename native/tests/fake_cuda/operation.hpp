// Operations that wait in a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "copy/copy_runs.hpp"
#include "fake_cuda/capture.hpp"
#include "fake_cuda/fake_control.hpp"
#include "fake_cuda/happens_before.hpp"

namespace kvo::fake {

struct Event {
    bool lets_sleep = false;           // who waits for it in a call; else he spins
    std::uint64_t records = 0;         // asked for
    std::uint64_t completed = 0;       // the latest that the streams have come to
    VectorClock clock;                 // of the latest asked for
    std::shared_ptr<Capture> capture;  // that it was last recorded in, ended or not
};

struct Move {
    std::uint64_t destination = 0;
    std::uint64_t source = 0;
    std::uint64_t length = 0;
};

// The moves happen in any order. Unless `reads_in_stream_order`, sources may be read before the stream's earlier work
// is done.
struct Transfer {
    std::vector<Move> moves;
    bool reads_in_stream_order = true;
};

struct RunKernel {
    CopyRuns runs;
    std::uint32_t team_size = 1;
    std::uint64_t threads = 1;
};

struct Compute {
    std::vector<Bytes> reads;
    std::vector<Bytes> writes;
    std::uint64_t pattern = 0;
};

struct RecordEvent {
    std::shared_ptr<Event> event;
    std::uint64_t record = 0;
};

struct WaitForEvent {
    std::shared_ptr<Event> event;
    std::uint64_t record = 0;
};

struct Operation {
    Accessor accessor;
    VectorClock known;              // what happens before it
    VectorClock known_to_its_host;  // the part of it that comes from the host alone
    std::variant<Transfer, RunKernel, Compute, RecordEvent, WaitForEvent> work;
    int failure = 0;  // of a transfer or kernel: when it has run in part, the device is lost with this
};

}  // namespace kvo::fake

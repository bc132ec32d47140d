// One direction of a CUDA engine: two streams, buffers, and the thread that feeds and watches them.
//
//     queue ──► current ──► parts with the device ──► running ──► digesting ──► tickets
//
// The thread waits inside no call. Parts follow each other on the device by events alone; a plan ends, and what the
// host shares with the device is used again, when the host has seen the part's event. It asks for that event every few
// microseconds, but sleeps while the plan in front waits for the model: a watch wakes it. After a call that failed the
// lane hands out nothing until both streams are empty; then what failed ends and the rest goes on.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <future>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "copy/copy_order.hpp"
#include "copy/copy_tickets.hpp"
#include "copy/cuda_part.hpp"
#include "copy/cuda_settings.hpp"
#include "copy/cuda_watch.hpp"
#include "copy/list_ring.hpp"
#include "copy/record_digests.hpp"
#include "copy/shared_blocks.hpp"

namespace kvo {

class CudaLane;

// What both lanes use. It outlives them.
struct CudaGround {
    CudaGround(const CudaApi& driver, const CudaSettings& chosen, PageTable table)
        : api(driver),
          settings(chosen),
          pages(std::move(table)),
          shared_blocks(pages),
          events(api),
          tickets(chosen.limits.plans),
          ways(std::make_shared<const WayTable>(chosen.ways)) {}

    const CudaApi api;
    const CudaSettings settings;
    const PageTable pages;  // that have passed their check
    const SharedBlocks shared_blocks;
    CudaDeviceId device = 0;
    CudaContext context = nullptr;
    std::uint32_t kernel_blocks = 1;
    CudaEventPool events;
    CopyTickets tickets;
    CopyOrder order;
    std::unique_ptr<CudaRanges> ranges;
    std::unique_ptr<RecordDigests> digests;
    std::atomic<bool> is_lost{false};
    std::vector<CudaLane*> lanes;  // none comes or goes while a thread of theirs runs
    // Something has ended that a lane may sleep for.
    void wake_lanes() noexcept;

    std::mutex mutex;  // of the following
    std::shared_ptr<const WayTable> ways;
    std::string kernel_problem;  // why there is no other way than batch; empty: there is
    std::string loss;            // what the driver said when the device was lost
};

// A plan on its way. Made by who submits; from then on the lane's thread's.
struct CudaJob {
    CopyTicket ticket = 0;
    std::shared_ptr<const CopyPlan> plan;
    SharedEvent after;  // null: nothing to wait for, or it is known to have come

    std::optional<RunList> runs;
    CopyWay way = CopyWay::batch;
    std::uint64_t issued = 0;                     // of its row
    std::size_t part_count = 0;                   // with the device
    std::chrono::steady_clock::time_point begun;  // seen to be free to move bytes
    std::chrono::nanoseconds copied{0};
    SharedEvent done;  // follows all of it
    Status status;
    std::shared_ptr<DigestWork> digests;  // being made
};

class CudaLane {
public:
    explicit CudaLane(CudaGround& ground) : ground_(ground), api_(ground.api) {}
    // close() has said that nothing runs, or open() that nothing began.
    ~CudaLane();
    CudaLane(const CudaLane&) = delete;
    CudaLane& operator=(const CudaLane&) = delete;

    // Starts the thread and waits until it has its streams and buffers.
    Status open();
    // Takes the list's one job. Not after begin_close.
    void submit(std::list<CudaJob> job) noexcept;
    void wake() noexcept;
    // What is queued ends, what runs goes on.
    void begin_close();
    // False: something still runs, and stops as soon as it can. May be asked again.
    bool wait_closed(int timeout_ms);

private:
    using Jobs = std::list<CudaJob>;  // moved from list to list as nodes, which needs no memory

    struct Bounce {
        std::uint8_t* host = nullptr;
        CudaAddress mapped = 0;
        bool is_free = true;
    };
    // What one part has, from its first call to the driver until the host has seen its end.
    struct Place {
        CudaEvent crossed = nullptr;  // from one stream to the other
        CudaEvent ended = nullptr;
        CudaJob* job = nullptr;
        Bounce* bounce = nullptr;
        std::uint64_t begin = 0, end = 0;              // of the row
        std::uint64_t lists_begin = 0, lists_end = 0;  // of the ring
        std::size_t transfers = 0;                     // that the driver has queued
        std::shared_ptr<const HostPieces> pieces;      // registered for as long as this is held
    };
    // A buffer on the device, and the part that used it last.
    struct Staging {
        CudaAddress address = 0;
        const Place* last = nullptr;
    };
    struct Strange {
        std::chrono::steady_clock::time_point since;
        int count = 0;
    };

    // The thread: cuda_lane.cpp.
    void run(std::promise<Status> opened);
    bool step();
    bool may_sleep();
    bool work();
    bool take_job();
    void begin_job();
    bool issue_part();
    void end_issue();
    bool poll_parts();
    bool poll_jobs();
    void note_begin();
    bool poll_digests();
    void retire(Place& place);
    void start_digests(CudaJob& job);
    void end_first();
    void tell(CudaJob& job) noexcept;

    // What goes wrong: cuda_lane_faults.cpp.
    void fail_current(Status status) noexcept;
    void fail_call(const char* function, CudaStatus status);
    void doubt(const char* function, CudaStatus status);
    void lose(const char* function, CudaStatus status);
    enum class Streams : std::uint8_t { running, empty, ended };
    Streams query_streams();
    bool poll_drain();
    bool poll_loss();
    void poll_close();
    void end_queue(const char* why);
    void retire_all();
    bool is_idle() const { return current_.empty() && running_.empty() && digesting_.empty(); }

    // The device's share: cuda_lane_device.cpp.
    Status open_device();
    Status open_kernels();
    Status open_places();
    void close_kernels();
    void close_device();

    // One part's calls to the driver: cuda_issue.cpp.
    CudaStatus issue(const CudaJob& job, const CopyPart& part, const Place& place, const Staging* staging,
                     const char*& function);
    CudaStatus issue_transfers(CopyDirection direction, std::span<const PartEntry> entries, const char*& function);
    CudaStatus issue_one_by_one(CopyDirection direction, std::span<const PartEntry> entries, const char*& function);
    CudaStatus issue_fetch(CopyDirection direction, const std::vector<PartEntry>& entries, const Place& place,
                           const char*& function);
    CudaStatus issue_kernel(const std::vector<PartEntry>& entries, const Place& place, const char*& function);
    CudaStatus launch(CudaFunction kernel, void** parameters, const char*& function);
    void copy_bounced(const CudaJob& job, const Place& place) const;
    void touch_host(const void* address, std::uint64_t length, bool is_written) const;
    bool uses_kernels(const CudaJob& job) const { return job.way != CopyWay::batch; }
    // The stream that `job`'s pages are touched on, and the one that its parts end on.
    CudaStream page_stream(const CudaJob& job) const { return uses_kernels(job) ? kernels_ : transfers_; }
    CudaStream last_stream(const CudaJob& job) const {
        const bool ends_in_kernel =
            job.way == CopyWay::mapped || (job.way == CopyWay::staged && job.plan->direction == CopyDirection::load);
        return ends_in_kernel ? kernels_ : transfers_;
    }

    CudaGround& ground_;
    const CudaApi& api_;

    std::mutex mutex_;  // of the following
    std::condition_variable changed_;
    Jobs queue_;
    bool is_woken_ = false;
    bool is_closing_ = false;
    bool is_aborting_ = false;
    bool is_closed_ = true;  // no thread, nothing to give back

    // The thread's own.
    CudaStream kernels_ = nullptr;
    CudaStream transfers_ = nullptr;
    CudaModule module_ = nullptr;
    CudaFunction copy_runs_ = nullptr;  // null: batch is the only way
    CudaFunction fetch_ = nullptr;
    CudaAddress device_memory_ = 0;
    void* host_memory_ = nullptr;
    bool has_batches_ = false;
    std::vector<Bounce> bounces_;
    std::vector<Staging> stagings_;
    std::size_t next_staging_ = 0;
    ListRing lists_;  // of runs for kernels: written by the host, fetched to the same place on the device
    std::uint8_t* host_lists_ = nullptr;
    CudaAddress mapped_lists_ = 0;
    CudaAddress device_lists_ = 0;
    std::vector<Place> places_;
    std::size_t first_place_ = 0;  // with the device, longest
    std::size_t place_count_ = 0;
    std::size_t queued_transfers_ = 0;
    Jobs current_;    // one or none: being handed to the device
    Jobs running_;    // all of it with the device, in order
    Jobs digesting_;  // moved, and its records still being read
    bool is_draining_ = false;
    std::optional<Strange> strange_;  // since the last sensible answer to a poll
    std::unique_ptr<CudaWatch> watch_;
    std::thread thread_;
};

}  // namespace kvo

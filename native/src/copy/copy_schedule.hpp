// The schedule of the host engine: decides which piece of which plan a thread copies next. It copies nothing and knows
// no threads.
//
//     submitted ──► prepared ──► pieces handed out ──► ended
//                      │
//                      └─ waits for every earlier plan that has not ended and that it shares bytes with,
//                         if one of the two writes them
//
// So plans that have nothing to do with each other run at the same time, and all others as if one after the other.
// Loads and saves get pieces in turn: a request that waits for its blocks does not wait for all saves before it, and
// saves are not starved. Two plans share bytes if they name one block, of whatever groups, or if their slots overlap.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "copy/copy_engine.hpp"
#include "copy/copy_plan.hpp"
#include "copy/run_list.hpp"

namespace kvo {

// The blocks and slots that a plan touches. Immutable once made.
struct CopyFootprint {
    struct Range {
        std::uint64_t begin = 0;
        std::uint64_t end = 0;
    };

    CopyDirection direction = CopyDirection::save;
    std::vector<std::uint32_t> blocks;  // ascending
    std::vector<Range> slots;           // ascending; of one plan's slots some may overlap
};

CopyFootprint make_footprint(const CopyPlan& plan, const PageTable& pages);

// Whether the order of the two plans can be seen in any byte.
bool have_order(const CopyFootprint& a, const CopyFootprint& b) noexcept;

struct CopyJob {
    explicit CopyJob(CopyPlan submitted) : plan(std::move(submitted)) {}

    CopyTicket ticket = 0;
    const CopyPlan plan;

    // Made by the thread that prepares; no other thread reads them before that has ended.
    std::optional<RunList> runs;
    CopyFootprint footprint;
    std::vector<std::shared_ptr<const CopyJob>> waits_for;

    // Several threads add to the digests of a record that was cut.
    std::mutex digest_lock;
    std::vector<RunDigest> digests;

    // When its first piece was taken, and when it ended. The engine's, under its lock.
    std::chrono::steady_clock::time_point begun, ended;

    // The schedule's own.
    enum class Stage : std::uint8_t { submitted, preparing, prepared, ended } stage = Stage::submitted;
    std::uint64_t next = 0;      // first byte of the row that no thread has
    std::size_t pieces_out = 0;  // in the hands of threads
    Status status;
};

struct CopyTask {
    enum class Kind : std::uint8_t { prepare, piece } kind = Kind::piece;
    std::shared_ptr<CopyJob> job;
    std::uint64_t begin = 0;  // of a piece, in the row
    std::uint64_t end = 0;
};

// Not safe for several threads: the engine's lock is held for every call. What is noexcept allocates nothing, so that
// every plan that was submitted also ends.
class CopySchedule {
public:
    explicit CopySchedule(std::uint64_t piece_bytes) : piece_bytes_(piece_bytes) {}

    void submit(std::shared_ptr<CopyJob> job);

    bool has_task() const noexcept { return choose().job != nullptr; }
    std::optional<CopyTask> take() noexcept;

    // Plans that have not ended and were submitted before `job`: what it may have to wait for. Throws std::bad_alloc.
    std::vector<std::shared_ptr<const CopyJob>> list_earlier(const CopyJob& job) const;

    // Ends the preparation of a job that was taken for it. Its `waits_for` may name jobs that have ended since.
    void end_prepare(CopyJob& job, Status status) noexcept;
    void end_piece(CopyJob& job, Status status) noexcept;

    // Fails what has not begun, or also what has, from its next piece on.
    void drop_waiting(const Status& status);
    void drop_running(const Status& status);

    std::size_t plan_count() const noexcept { return jobs_.size() + ended_.size(); }
    std::size_t ended_count() const noexcept { return ended_.size(); }
    bool is_idle() const noexcept { return jobs_.empty(); }
    bool has_ended_up_to(CopyTicket ticket) const noexcept { return jobs_.empty() || jobs_.front()->ticket > ticket; }

    // Ended jobs, in the order of their ends.
    std::list<std::shared_ptr<CopyJob>> take_ended() noexcept;

private:
    using Jobs = std::list<std::shared_ptr<CopyJob>>;
    struct Choice {
        CopyTask::Kind kind = CopyTask::Kind::piece;
        const std::shared_ptr<CopyJob>* job = nullptr;
    };

    static std::size_t index(CopyDirection direction) noexcept { return static_cast<std::size_t>(direction); }
    Choice choose() const noexcept;
    const std::shared_ptr<CopyJob>* find_piece(CopyDirection direction) const noexcept;
    const std::shared_ptr<CopyJob>* find_submitted() const noexcept;
    void drop(CopyJob& job, Status status) noexcept;
    void fail(CopyJob& job, Status status) noexcept;
    void end_if_done(CopyJob& job) noexcept;

    std::uint64_t piece_bytes_;
    Jobs jobs_;  // not ended, in the order of submission
    Jobs ended_;
    std::size_t submitted_[2] = {};  // not prepared, by direction
    std::size_t unended_[2] = {};
    bool is_preparing_ = false;  // one at a time, so that all earlier plans are known to the later
    CopyDirection turn_ = CopyDirection::load;
};

// Plans that share bytes, one of them writing, run one after the other, in the order of their submission.
//
// Safe to call from any thread, but not by two at once for the same ticket. No lock is held while plans are compared.
class CopyOrder {
public:
    // Adds a plan; plans are added in the order of their tickets. Throws std::bad_alloc, and adds nothing then.
    void add(CopyTicket ticket, std::shared_ptr<const CopyPlan> plan);
    // Whether no earlier plan that has not ended stands in this one's way. The first time it costs a comparison with
    // each of them. Throws std::bad_alloc; ask again.
    bool may_begin(CopyTicket ticket, const PageTable& pages);
    void end(CopyTicket ticket) noexcept;

private:
    struct Entry {
        std::shared_ptr<const CopyPlan> plan;
        std::once_flag is_measured;
        CopyFootprint footprint;
        std::optional<std::vector<CopyTicket>> waits_for;  // once asked for
    };

    static const CopyFootprint& measure(Entry& entry, const PageTable& pages);
    std::vector<CopyTicket> find_earlier(CopyTicket ticket, Entry& self, const PageTable& pages);

    std::mutex mutex_;
    std::map<CopyTicket, std::shared_ptr<Entry>> entries_;
};

}  // namespace kvo

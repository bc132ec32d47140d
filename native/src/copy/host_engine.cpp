#include "copy/host_engine.hpp"

#include <pthread.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "copy/copy_plan.hpp"
#include "copy/copy_schedule.hpp"
#include "copy/host_copy.hpp"
#include "shim/numa_policy.hpp"

namespace kvo {
namespace {

constexpr unsigned kMaxThreads = 8;
constexpr unsigned kThreadLimit = 1024;  // beyond it a number is a mistake

Status closed() { return {Code::unavailable, "the copy engine is closed"}; }

Status no_memory() { return {Code::failed, "no memory"}; }  // short enough to need none itself

// Addresses spread evenly over every allocation, which tell on which NUMA nodes the engine's memory lies.
std::vector<std::uint64_t> sample_addresses(const PageTable& pages) {
    constexpr std::uint64_t kGaps = 15;
    struct Extent {
        std::uint64_t first = std::numeric_limits<std::uint64_t>::max();
        std::uint64_t last = 0;
    };
    const std::uint64_t last_block = std::max<std::uint64_t>(pages.block_count, 1) - 1;
    std::map<std::uint32_t, Extent> extents;
    for (const GroupPages& group : pages.groups) {
        for (const PageRun& run : group.runs) {
            Extent& extent = extents[run.allocation];
            extent.first = std::min(extent.first, run.base);
            extent.last = std::max(extent.last, run.base + last_block * run.stride + run.length - 1);
        }
    }
    std::vector<std::uint64_t> addresses;
    for (const auto& [allocation, extent] : extents) {
        for (std::uint64_t gap = 0; gap <= kGaps; ++gap) {
            addresses.push_back(extent.first + (extent.last - extent.first) / kGaps * gap);
        }
    }
    return addresses;
}

}  // namespace

// The state that the threads share.
class HostEngine::Core {
public:
    Core(PageTable pages, HostEngineTerms terms)
        : pages_(std::move(pages)), shared_(pages_), terms_(std::move(terms)), schedule_(terms_.piece_bytes) {}
    ~Core() { stop(); }
    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;

    Status start();
    bool is_of_this_process() const noexcept { return getpid() == process_; }
    unsigned thread_count() const noexcept { return thread_count_; }

    Result<CopyTicket> submit(CopyPlan plan);
    std::vector<FinishedCopy> poll();
    bool fence(int timeout_ms);
    Status close(int timeout_ms);

private:
    void run();
    Status prepare(CopyJob& job);
    Status copy(const CopyTask& task);
    void stop();
    void join();

    const PageTable pages_;
    const SharedBlocks shared_;
    const HostEngineTerms terms_;
    const pid_t process_ = getpid();

    std::mutex lock_;
    std::condition_variable work_;   // something to take, or the end
    std::condition_variable ended_;  // a plan has ended
    CopySchedule schedule_;
    CopyTicket last_ticket_ = 0;
    bool is_closed_ = false;
    bool is_stopping_ = false;
    std::vector<std::thread> threads_;  // empty once a caller joins them

    unsigned thread_count_ = 0;  // as it was after the start
};

Status HostEngine::Core::start() {
    const std::vector<unsigned> own = thread_cpus();
    const std::vector<unsigned> near = choose_cpus(own, cpus_near(sample_addresses(pages_)));
    const std::size_t halved = std::clamp<std::size_t>((own.size() + 1) / 2, 1, kMaxThreads);
    const std::size_t wanted = terms_.threads > 0 ? terms_.threads : halved;
    threads_.reserve(wanted);
    try {
        while (threads_.size() < wanted) {
            threads_.emplace_back([this, near, is_narrower = near.size() < own.size()] {
                pthread_setname_np(pthread_self(), "kvoffload-copy");
                if (is_narrower) {
                    keep_thread_on(near);
                }
                run();
            });
        }
    } catch (const std::system_error& fault) {
        if (threads_.empty()) {
            return {Code::failed, std::string("no thread for copies can be started: ") + fault.what()};
        }
    }
    thread_count_ = static_cast<unsigned>(threads_.size());
    return {};
}

Result<CopyTicket> HostEngine::Core::submit(CopyPlan plan) {
    if (Status status = check_plan(plan, pages_, shared_); !status.ok()) {
        return status;
    }
    // Made before the lock is taken, so that a thread never waits for the allocator.
    auto job = std::make_shared<CopyJob>(std::move(plan));
    CopyTicket ticket = 0;
    {
        const std::lock_guard hold(lock_);
        if (is_closed_) {
            return closed();
        }
        if (schedule_.plan_count() >= terms_.limits.plans) {
            return Status(Code::unavailable, "all " + std::to_string(terms_.limits.plans) +
                                                 " plans that may be under way are; poll to make room");
        }
        ticket = job->ticket = last_ticket_ + 1;
        schedule_.submit(std::move(job));
        last_ticket_ = ticket;
    }
    work_.notify_one();
    return ticket;
}

std::vector<FinishedCopy> HostEngine::Core::poll() {
    std::list<std::shared_ptr<CopyJob>> jobs;
    std::vector<FinishedCopy> finished;
    {
        const std::lock_guard hold(lock_);
        finished.reserve(schedule_.ended_count());
        jobs = schedule_.take_ended();
    }
    for (const std::shared_ptr<CopyJob>& job : jobs) {
        FinishedCopy& one = finished.emplace_back();
        one.ticket = job->ticket;
        one.status = std::move(job->status);
        if (one.status.ok()) {
            one.digests = std::move(job->digests);
        }
        if (job->begun.time_since_epoch().count() != 0) {
            one.copied = job->ended - job->begun;
        }
    }
    return finished;
}

bool HostEngine::Core::fence(int timeout_ms) {
    std::unique_lock hold(lock_);
    return ended_.wait_for(hold, std::chrono::milliseconds(timeout_ms),
                           [this, last = last_ticket_] { return schedule_.has_ended_up_to(last); });
}

Status HostEngine::Core::close(int timeout_ms) {
    std::unique_lock hold(lock_);
    is_closed_ = true;
    schedule_.drop_waiting({Code::failed, "the copy engine was closed before this copy began"});
    ended_.notify_all();
    const auto is_idle = [this] { return schedule_.is_idle(); };
    if (!ended_.wait_for(hold, std::chrono::milliseconds(timeout_ms), is_idle)) {
        schedule_.drop_running({Code::failed, "the copy engine was closed during this copy"});
        ended_.notify_all();
    }
    is_stopping_ = true;
    work_.notify_all();
    if (!schedule_.is_idle()) {
        return {Code::failed, "a copy still runs after " + std::to_string(timeout_ms) + " ms; its memory must stay"};
    }
    hold.unlock();
    join();
    return {};
}

void HostEngine::Core::stop() {
    {
        const std::lock_guard hold(lock_);
        is_closed_ = is_stopping_ = true;
        schedule_.drop_running({Code::failed, "closed"});
    }
    work_.notify_all();
    join();
}

// If several callers close at once, the first one joins. The others find no copy under way, which is all they need.
void HostEngine::Core::join() {
    std::unique_lock hold(lock_);
    std::vector<std::thread> threads = std::exchange(threads_, {});
    hold.unlock();
    for (std::thread& thread : threads) {
        thread.join();
    }
}

// The loop of a thread: takes a task, does it, reports it. A thread that takes one and leaves more behind wakes the
// next.
void HostEngine::Core::run() {
    std::unique_lock hold(lock_);
    while (true) {
        work_.wait(hold, [this] { return is_stopping_ || schedule_.has_task(); });
        std::optional<CopyTask> task = schedule_.take();
        if (!task) {
            return;
        }
        if (task->kind == CopyTask::Kind::piece && task->begin == 0) {
            task->job->begun = std::chrono::steady_clock::now();
        }
        if (schedule_.has_task()) {
            work_.notify_one();
        }
        hold.unlock();
        Status status;
        if (task->kind == CopyTask::Kind::piece) {
            status = copy(*task);
            hold.lock();
            schedule_.end_piece(*task->job, std::move(status));
        } else {
            status = prepare(*task->job);
            hold.lock();
            schedule_.end_prepare(*task->job, std::move(status));
        }
        const bool has_ended = task->job->stage == CopyJob::Stage::ended;
        if (has_ended) {
            task->job->ended = std::chrono::steady_clock::now();
            ended_.notify_all();
        }
    }
}

Status HostEngine::Core::prepare(CopyJob& job) {
    try {
        if (terms_.before_prepare) {
            terms_.before_prepare(job.ticket);
        }
        job.runs.emplace(job.plan, pages_);
        job.digests.resize(job.plan.has_digests ? job.plan.items.size() : 0);
        job.footprint = make_footprint(job.plan, pages_);
        std::unique_lock hold(lock_);
        job.waits_for = schedule_.list_earlier(job);
        hold.unlock();
        std::erase_if(job.waits_for,
                      [&](const auto& earlier) { return !have_order(earlier->footprint, job.footprint); });
        return {};
    } catch (const std::bad_alloc&) {
        return no_memory();
    }
}

Status HostEngine::Core::copy(const CopyTask& task) {
    CopyJob& job = *task.job;
    try {
        if (terms_.before_piece) {
            terms_.before_piece(job.ticket);
        }
        copy_piece(job.plan, *job.runs, task.begin, task.end, [&](std::uint32_t item, const RunDigest& digest) {
            const std::lock_guard hold(job.digest_lock);
            job.digests[item] = combine(job.digests[item], digest);
        });
        return {};
    } catch (const std::bad_alloc&) {
        return no_memory();
    }
}

HostEngine::HostEngine(std::unique_ptr<Core> core) : core_(std::move(core)) {}

HostEngine::~HostEngine() {
    if (!core_->is_of_this_process()) {
        // The threads are not here, and what they wait on can be neither used nor destroyed.
        static_cast<void>(core_.release());
    }
}

Result<std::unique_ptr<HostEngine>> HostEngine::create(PageTable pages, HostEngineTerms terms) {
    if (Status status = check_pages(pages); !status.ok()) {
        return status;
    }
    if (terms.threads > kThreadLimit || terms.piece_bytes == 0 || terms.limits.plans == 0) {
        return Status(Code::invalid, "a copy engine has at most " + std::to_string(kThreadLimit) +
                                         " threads, pieces of at least a byte, and room for a plan");
    }
    auto core = std::make_unique<Core>(std::move(pages), std::move(terms));
    if (Status status = core->start(); !status.ok()) {
        return status;
    }
    return std::unique_ptr<HostEngine>(new HostEngine(std::move(core)));
}

Result<CopyTicket> HostEngine::submit(CopyPlan plan, std::optional<ComputeStream>) {
    if (!core_->is_of_this_process()) {
        return Status(Code::unavailable,
                      "the copy engine belongs to the process that made it, and this is a child of it");
    }
    return core_->submit(std::move(plan));
}

std::vector<FinishedCopy> HostEngine::poll() {
    return core_->is_of_this_process() ? core_->poll() : std::vector<FinishedCopy>();
}

bool HostEngine::fence(int timeout_ms) { return core_->is_of_this_process() && core_->fence(timeout_ms); }

Status HostEngine::close(int timeout_ms) { return core_->is_of_this_process() ? core_->close(timeout_ms) : Status(); }

unsigned HostEngine::thread_count() const noexcept { return core_->thread_count(); }

}  // namespace kvo

#include "copy/cuda_ranges.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iterator>
#include <limits>
#include <new>
#include <system_error>
#include <utility>

namespace kvo {
namespace {

// How often a piece that was removed is looked at again while a copy still has it.
constexpr std::chrono::milliseconds kLeavingInterval{2};

bool is_within(const auto& part, const auto& whole) { return part.begin >= whole.begin && part.end <= whole.end; }

std::uint64_t page_bytes() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

std::uint64_t rounded_down(std::uint64_t value) { return value / page_bytes() * page_bytes(); }

std::uint64_t rounded_up(std::uint64_t value) { return rounded_down(value + page_bytes() - 1); }

}  // namespace

HostSpan span_at(const HostPieces& pieces, std::uint64_t address, std::uint64_t length) {
    const auto next = std::ranges::upper_bound(pieces, address, {}, &HostPiece::begin);
    if (next != pieces.begin() && address < std::prev(next)->end) {
        const HostPiece& piece = *std::prev(next);
        return {std::min(length, piece.end - address), true, piece.mapped + (address - piece.begin)};
    }
    return {next == pieces.end() ? length : std::min(length, next->begin - address), false, 0};
}

CudaRanges::CudaRanges(const CudaApi& api, CudaContext context, std::uint64_t piece_bytes)
    : api_(api), context_(context), piece_bytes_(std::max(rounded_down(piece_bytes), page_bytes())) {}

Result<std::unique_ptr<CudaRanges>> CudaRanges::start(const CudaApi& api, CudaContext context,
                                                      std::uint64_t piece_bytes) {
    std::unique_ptr<CudaRanges> ranges(new CudaRanges(api, context, piece_bytes));
    try {
        ranges->thread_ = std::thread([self = ranges.get()] { self->run(); });
    } catch (const std::system_error& fault) {
        return Status(Code::failed, std::string("no thread can be started to register memory: ") + fault.what());
    }
    return ranges;
}

CudaRanges::~CudaRanges() {
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
        changed_.notify_all();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
}

Status CudaRanges::add(std::uint64_t begin, std::uint64_t length) {
    const std::uint64_t last = std::numeric_limits<std::uint64_t>::max() - page_bytes();
    if (length == 0 || begin > last || length > last - begin) {
        return {Code::invalid, "a range of host memory has bytes, and an address for each"};
    }
    std::list<Range> node = {{rounded_up(begin), rounded_down(begin + length)}};
    const std::lock_guard lock(mutex_);
    asked_.push_back({begin, begin + length});
    progress_.asked_bytes += length;
    if (node.front().begin < node.front().end) {
        progress_.is_done = false;
        queue_.splice(queue_.end(), node);
        changed_.notify_all();
    }
    return {};
}

Status CudaRanges::remove(std::uint64_t begin, std::uint64_t length) {
    std::list<Range> node = {{begin, begin + length}};
    const std::lock_guard lock(mutex_);
    const auto asked = std::ranges::find(asked_, node.front());
    if (asked == asked_.end()) {
        return {Code::invalid, "a range is removed as it was added, and once"};
    }
    asked_.erase(asked);
    for (Range& range : queue_) {
        range.end = is_within(range, node.front()) ? range.begin : range.end;
    }
    progress_.asked_bytes -= length;
    progress_.is_leaving = true;
    removed_.splice(removed_.end(), node);
    changed_.notify_all();
    return {};
}

std::shared_ptr<const HostPieces> CudaRanges::pieces() const {
    const std::lock_guard lock(mutex_);
    return pieces_;
}

RegistrationProgress CudaRanges::progress() const {
    const std::lock_guard lock(mutex_);
    return progress_;
}

void CudaRanges::wait_for(std::uint64_t bytes, int timeout_ms) const {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                      [&] { return progress_.registered_bytes >= bytes || progress_.is_done || is_stopping_; });
}

bool CudaRanges::close(int timeout_ms) {
    std::unique_lock lock(mutex_);
    is_stopping_ = unregisters_ = true;
    changed_.notify_all();
    return changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), [this] { return is_closed_; });
}

void CudaRanges::run() {
    pthread_setname_np(pthread_self(), "kvoffload-pin");
    int mode = kCudaCaptureModeRelaxed;
    api_.cuThreadExchangeStreamCaptureMode(&mode);
    const CudaStatus current = api_.cuCtxSetCurrent(context_);
    std::unique_lock lock(mutex_);
    note_problem("cuCtxSetCurrent", 0, current);
    while (!is_stopping_) {
        take_out();
        unregister_unused(lock);
        std::erase_if(queue_, [](const Range& range) { return range.begin >= range.end; });
        // Removed ranges go first: the next one to be registered may lie at the same address.
        const bool is_leaving = !removed_.empty() || !leaving_.empty();
        if (!is_leaving && !queue_.empty()) {
            const Clock::time_point begun = Clock::now();
            register_next(lock);
            yield_driver(lock, begun);
        }
        progress_.is_done = queue_.empty();
        progress_.is_leaving = is_leaving || !removed_.empty();
        changed_.notify_all();
        if (is_leaving) {
            changed_.wait_for(lock, kLeavingInterval);
        } else {
            changed_.wait(lock, [this] { return is_stopping_ || !queue_.empty() || !removed_.empty(); });
        }
    }
    if (unregisters_) {
        lock.unlock();
        unregister_all();
        lock.lock();
        is_closed_ = true;
        changed_.notify_all();
    }
}

// The driver's lock is not fair: a thread that asks again at once keeps launches out for many pieces (80 ms on an H200,
// 0.7 with a pause).
void CudaRanges::yield_driver(std::unique_lock<std::mutex>& lock, Clock::time_point begun) {
    changed_.wait_for(lock, Clock::now() - begun, [this] { return is_stopping_; });
}

void CudaRanges::register_next(std::unique_lock<std::mutex>& lock) {
    const Range range = queue_.front();
    const Range piece{range.begin, std::min(range.end, range.begin + piece_bytes_)};
    lock.unlock();
    const bool is_registered = register_piece(piece);
    lock.lock();
    progress_.registered_bytes += is_registered ? piece.end - piece.begin : 0;
    // One refusal says that the next would be refused too: the rest of the range goes through the bounce buffer.
    queue_.front().begin = is_registered ? piece.end : range.end;
    if (queue_.front().begin >= queue_.front().end) {
        queue_.pop_front();
    }
    progress_.is_done = queue_.empty();  // under one lock with the bytes: a caller that sees the last of them sees this
}

// The lock is held. Nothing that is short of memory may end the process.
void CudaRanges::note_problem(const char* what, std::uint64_t length, CudaStatus status) noexcept {
    if (status == kCudaSuccess) {
        return;
    }
    try {
        const std::string of = length == 0 ? "" : " of " + std::to_string(length) + " bytes";
        progress_.problem = what + of + ": " + api_.driver.describe(status);
    } catch (const std::bad_alloc&) {
        progress_.problem = "no memory";
    }
}

bool CudaRanges::register_piece(const Range& piece) {
    void* const address = reinterpret_cast<void*>(piece.begin);
    const std::uint64_t length = piece.end - piece.begin;
    const char* function = "";
    CudaStatus status = kCudaOutOfMemory;
    try {
        // Only this thread changes the list. All the memory that this takes is had before the driver is asked.
        auto pieces = std::make_shared<HostPieces>();
        pieces->reserve(this->pieces()->size() + 1);
        *pieces = *this->pieces();
        prepare_to_publish();
        function = "cuMemHostRegister";
        status = api_.cuMemHostRegister(address, length, kCudaHostRegisterPortable | kCudaHostRegisterMapped);
        CudaAddress mapped = 0;
        if (status == kCudaSuccess) {
            function = "cuMemHostGetDevicePointer";
            status = api_.cuMemHostGetDevicePointer(&mapped, address, 0);
            if (status != kCudaSuccess) {
                api_.cuMemHostUnregister(address);
            }
        }
        if (status == kCudaSuccess) {
            pieces->insert(std::ranges::upper_bound(*pieces, piece.begin, {}, &HostPiece::begin),
                           {piece.begin, piece.end, mapped});
            const std::lock_guard lock(mutex_);
            publish(std::move(pieces));
            return true;
        }
    } catch (const std::bad_alloc&) {
        function = "the list of what is registered";
    }
    const std::lock_guard lock(mutex_);
    note_problem(function, length, status);
    return false;
}

// Reserves memory now, so that publishing needs none.
void CudaRanges::prepare_to_publish() {
    const std::lock_guard lock(mutex_);
    std::erase_if(former_, [](const Former& former) { return former.pieces.expired(); });
    former_.reserve(former_.size() + 1);
}

// The lock is held.
void CudaRanges::publish(std::shared_ptr<const HostPieces> pieces) noexcept {
    former_.push_back({number_++, pieces_});
    pieces_ = std::move(pieces);
}

// The lock is held. What finds no memory is done the next time.
void CudaRanges::take_out() {
    while (!removed_.empty()) {
        const auto is_gone = [&](const HostPiece& piece) { return is_within(piece, removed_.front()); };
        try {
            auto pieces = std::make_shared<HostPieces>(*pieces_);
            const auto gone = std::erase_if(*pieces, is_gone);
            leaving_.reserve(leaving_.size() + gone);
            former_.reserve(former_.size() + 1);
            for (const HostPiece& piece : *pieces_) {
                if (is_gone(piece)) {
                    leaving_.push_back({number_, piece});
                }
            }
            publish(std::move(pieces));
        } catch (const std::bad_alloc&) {
            return;
        }
        removed_.pop_front();
    }
}

void CudaRanges::unregister_unused(std::unique_lock<std::mutex>& lock) {
    std::erase_if(former_, [](const Former& former) { return former.pieces.expired(); });
    const std::uint64_t oldest = former_.empty() ? number_ : former_.front().number;
    while (!leaving_.empty() && leaving_.front().number < oldest) {
        const HostPiece piece = leaving_.front().piece;
        lock.unlock();
        const Clock::time_point begun = Clock::now();
        api_.cuMemHostUnregister(reinterpret_cast<void*>(piece.begin));
        lock.lock();
        leaving_.erase(leaving_.begin());
        progress_.registered_bytes -= piece.end - piece.begin;
        yield_driver(lock, begun);
    }
}

void CudaRanges::unregister_all() {
    const std::shared_ptr<const HostPieces> pieces = this->pieces();
    for (const HostPiece& piece : *pieces) {
        api_.cuMemHostUnregister(reinterpret_cast<void*>(piece.begin));
    }
    for (const Leaving& leaving : leaving_) {
        api_.cuMemHostUnregister(reinterpret_cast<void*>(leaving.piece.begin));
    }
    const std::lock_guard lock(mutex_);
    leaving_.clear();
    pieces_ = none_;
}

}  // namespace kvo

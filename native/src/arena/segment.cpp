#include "arena/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <limits>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "base/status.hpp"
#include "shim/memory_headroom.hpp"
#include "shim/shared_mapping.hpp"

namespace kvo {
namespace {

// Named here because the headers of older systems do not know them.
constexpr unsigned kNoExecSeal = 8;
constexpr unsigned kHugeShift = 26;
constexpr auto kHugetlbMagic = static_cast<decltype(std::declval<struct statfs>().f_type)>(0x958458f6);

constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

std::uint64_t system_page_bytes() { return static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)); }

std::uint64_t hugetlb_page_bytes(HugePages wish) {
    switch (wish) {
        case HugePages::hugetlb_2m:
            return std::uint64_t{1} << 21;
        case HugePages::hugetlb_1g:
            return std::uint64_t{1} << 30;
        default:
            return 0;
    }
}

std::size_t choose_alignment(std::uint64_t size, std::uint64_t page_bytes) {
    return static_cast<std::size_t>(std::max(page_bytes, size >= kHugePageBytes ? kHugePageBytes : page_bytes));
}

// Setting a size beyond this limit does not only fail, it sends SIGXFSZ.
Status check_file_limit(std::uint64_t size) {
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && size > limit.rlim_cur) {
        return {Code::unavailable, "a segment of " + std::to_string(size) + " bytes is over this process's file size " +
                                       "limit of " + std::to_string(limit.rlim_cur) + " bytes (ulimit -f)"};
    }
    return {};
}

FileDescriptor open_memfd(const std::string& name, unsigned flags) {
    FileDescriptor file(memfd_create(name.c_str(), flags | MFD_CLOEXEC | MFD_ALLOW_SEALING | kNoExecSeal));
    if (!file.is_open() && errno == EINVAL) {  // before Linux 6.3
        file = FileDescriptor(memfd_create(name.c_str(), flags | MFD_CLOEXEC | MFD_ALLOW_SEALING));
    }
    return file;
}

// A sealed file. `huge_page`: 0 or a hugetlb page's size.
Result<FileDescriptor> make_file(const std::string& name, std::uint64_t size, std::uint64_t huge_page) {
    unsigned flags = 0;
    if (huge_page > 0) {
        flags = MFD_HUGETLB | static_cast<unsigned>(std::countr_zero(huge_page)) << kHugeShift;
    }
    FileDescriptor file = open_memfd(name, flags);
    if (!file.is_open()) {
        return system_fault("memfd_create", errno);
    }
    // Without this, processes of other users that were sent a read-only descriptor could open the file again for
    // writing.
    if (fchmod(file.number(), S_IRUSR | S_IWUSR) != 0) {
        return system_fault("fchmod of a memfd", errno);
    }
    if (ftruncate(file.number(), static_cast<off_t>(size)) != 0) {
        return system_fault("setting a memfd's size to " + std::to_string(size) + " bytes", errno);
    }
    if (fcntl(file.number(), F_ADD_SEALS, kSeals) != 0) {
        return system_fault("sealing a memfd", errno);
    }
    return file;
}

struct MadeFile {
    FileDescriptor file;
    SharedMapping mapping;
};

Result<MadeFile> make_and_map(const SegmentWish& wish, std::uint64_t huge_page) {
    if (huge_page > 0 && wish.size_bytes % huge_page != 0) {
        return Status(Code::invalid, "the size is no multiple of the page size");
    }
    Result<FileDescriptor> file = make_file(wish.name, wish.size_bytes, huge_page);
    if (!file.ok()) {
        return file.fault();
    }
    const std::uint64_t page_bytes = std::max(huge_page, system_page_bytes());
    Result<SharedMapping> mapping =
        SharedMapping::map(file.value().number(), wish.size_bytes, choose_alignment(wish.size_bytes, page_bytes),
                           Access::read_write, wish.fork_rule);
    if (!mapping.ok()) {
        return mapping.fault();
    }
    return MadeFile{std::move(file.value()), std::move(mapping.value())};
}

Status check_received(int file, const AdoptionTerms& terms) {
    const int seals = fcntl(file, F_GET_SEALS);
    if (seals < 0) {
        return {Code::invalid, "the file received as a segment is not a memfd"};
    }
    if ((seals & kSeals) != kSeals) {
        return {Code::invalid, "the memfd received as a segment is not sealed against shrinking, growing and sealing"};
    }
    struct stat state{};
    if (fstat(file, &state) != 0) {
        return system_fault("fstat of a segment", errno);
    }
    if (std::cmp_not_equal(state.st_size, terms.size_bytes)) {
        return {Code::invalid, "the memfd received as a segment has " + std::to_string(state.st_size) + " bytes, not " +
                                   std::to_string(terms.size_bytes)};
    }
    if (terms.is_own && state.st_uid != geteuid()) {
        return {Code::invalid, "the memfd received as a segment is of user " + std::to_string(state.st_uid) +
                                   ", not of user " + std::to_string(geteuid())};
    }
    if (fcntl(file, F_SETFD, FD_CLOEXEC) != 0) {
        return system_fault("FD_CLOEXEC on a segment", errno);
    }
    return {};
}

Result<FileDescriptor> open_again(const FileDescriptor& file, int access) {
    const std::string path = "/proc/self/fd/" + std::to_string(file.number());
    FileDescriptor again(open(path.c_str(), access | O_CLOEXEC));
    if (!again.is_open()) {
        return system_fault("opening a segment again by " + path, errno);
    }
    return again;
}

// The size of a memfd's hugetlb pages; 0 if it has none.
std::uint64_t find_hugetlb_page(int file) {
    struct statfs state{};
    return fstatfs(file, &state) == 0 && state.f_type == kHugetlbMagic ? static_cast<std::uint64_t>(state.f_bsize) : 0;
}

}  // namespace

Segment::Segment(FileDescriptor file, SharedMapping mapping, Access access) noexcept
    : file_(std::move(file)), mapping_(std::move(mapping)), access_(access) {
    const std::uint64_t huge_page = find_hugetlb_page(file_.number());
    is_hugetlb_ = huge_page > 0;
    page_bytes_ = std::max(huge_page, system_page_bytes());
}

Result<Segment> Segment::create(const SegmentWish& wish) {
    if (wish.size_bytes == 0 || wish.size_bytes % system_page_bytes() != 0 ||
        wish.size_bytes > std::numeric_limits<std::int64_t>::max() / 2) {
        return Status(Code::invalid, "a segment's size is a multiple of the page size, not " +
                                         std::to_string(wish.size_bytes) + " bytes");
    }
    if (Status limit = check_file_limit(wish.size_bytes); !limit.ok()) {
        return limit;
    }
    const std::uint64_t huge_page = hugetlb_page_bytes(wish.huge_pages);
    Result<MadeFile> made = make_and_map(wish, huge_page);
    std::string refused;
    if (!made.ok() && huge_page > 0) {
        refused = "hugetlb pages of " + std::to_string(huge_page) + " bytes: " + made.fault().message() +
                  " (pool: /proc/sys/vm/nr_hugepages)";
        made = make_and_map(wish, 0);
    }
    if (!made.ok()) {
        return made.fault();
    }
    Segment segment(std::move(made.value().file), std::move(made.value().mapping), Access::read_write);
    segment.refused_ = std::move(refused);
    segment.wish_transparent(wish.huge_pages);

    Result<std::string> unplaced = place_pages(segment.mapping_.start(), wish.size_bytes, wish.placement);
    if (!unplaced.ok()) {
        return unplaced.fault();
    }
    if (!unplaced.value().empty()) {
        segment.note_refusal("NUMA placement: " + unplaced.value());
    }
    return segment;
}

Result<Segment> Segment::adopt(FileDescriptor file, const AdoptionTerms& terms) {
    if (terms.size_bytes == 0) {
        return Status(Code::invalid, "a segment has at least one page");
    }
    if (Status received = check_received(file.number(), terms); !received.ok()) {
        return received;
    }
    if (terms.is_own) {
        Result<FileDescriptor> writable = open_again(file, O_RDWR);
        if (!writable.ok()) {
            return writable.fault();
        }
        file = std::move(writable.value());
    }
    const std::uint64_t page_bytes = std::max(find_hugetlb_page(file.number()), system_page_bytes());
    Result<SharedMapping> mapping = SharedMapping::map(
        file.number(), terms.size_bytes, choose_alignment(terms.size_bytes, page_bytes), terms.access, terms.fork_rule);
    if (!mapping.ok()) {
        return mapping.fault();
    }
    Segment segment(std::move(file), std::move(mapping.value()), terms.access);
    segment.wish_transparent(terms.huge_pages);
    return segment;
}

void Segment::note_refusal(const std::string& reason) { refused_ += refused_.empty() ? reason : "; " + reason; }

// A hugetlb wish that was not granted goes on as this one.
void Segment::wish_transparent(HugePages wish) {
    if (wish == HugePages::none || is_hugetlb_) {
        return;
    }
    if (madvise(mapping_.start(), mapping_.size(), MADV_HUGEPAGE) != 0) {
        note_refusal("transparent huge pages: " + system_fault("madvise", errno).message());
        return;
    }
    wants_transparent_ = true;
}

Status Segment::commit_range(std::uint64_t offset, std::uint64_t length, const CommitTerms& terms) {
    if (!is_writable() || offset > size_bytes() || length > size_bytes() - offset) {
        return {Code::invalid, "commit of a range outside a segment, or of one mapped read-only"};
    }
    if (length == 0) {
        return {};
    }
    const std::uint64_t begin = offset / page_bytes_ * page_bytes_;
    const std::uint64_t end = (offset + length + page_bytes_ - 1) / page_bytes_ * page_bytes_;
    const std::uint64_t missing = size_bytes() - std::min(size_bytes(), held_bytes());
    // The mapping of a hugetlb file has reserved its pages already.
    if (missing > 0 && !is_hugetlb_) {
        const std::uint64_t taken = std::min(missing, (end - begin) * std::max(terms.committers, 1U));
        if (Status room = check_memory_headroom(taken + terms.keep_free_bytes, terms.proc); !room.ok()) {
            return room;
        }
    }
    std::byte* const start = mapping_.start() + begin;
    if (wants_transparent_) {
        collapse_into_huge_pages(start, end - begin);
    }
    if (Status allocated = allocate_file_pages(file_.number(), begin, end - begin); !allocated.ok()) {
        return allocated;
    }
    return populate_pages(start, end - begin);
}

Status Segment::free_pages() { return free_file_pages(file_.number(), 0, size_bytes()); }

Result<FileDescriptor> Segment::open_read_only() const { return open_again(file_, O_RDONLY); }

std::uint64_t Segment::held_bytes() const {
    struct stat state{};
    return fstat(file_.number(), &state) == 0 ? static_cast<std::uint64_t>(state.st_blocks) * 512 : 0;
}

std::uint64_t Segment::huge_bytes() const { return huge_bytes_mapped(mapping_.start(), mapping_.size()); }

std::span<std::byte> Segment::writable_bytes() noexcept {
    return is_writable() ? std::span(mapping_.start(), mapping_.size()) : std::span<std::byte>();
}

namespace {

constexpr int kNiceness = 10;

// The work of one call. Each thread takes the next slice until none is left, the call is cancelled, or a slice fails.
class Filling {
public:
    Filling(Segment& segment, const PopulateTerms& terms, SegmentRange range, std::uint64_t slice_bytes,
            PopulateProgress& progress)
        : segment_(segment),
          terms_{terms.keep_free_bytes, std::max(terms.threads, 1U), terms.proc},
          end_(range.offset + range.length),
          slice_bytes_(slice_bytes),
          progress_(progress),
          next_(range.offset) {}

    void fill() {
        while (!progress_.is_cancelled.load(std::memory_order_relaxed) && !has_failed_.load()) {
            const std::uint64_t offset = next_.fetch_add(slice_bytes_, std::memory_order_relaxed);
            if (offset >= end_) {
                return;
            }
            const std::uint64_t length = std::min(slice_bytes_, end_ - offset);
            if (Status given = segment_.commit_range(offset, length, terms_); !given.ok()) {
                keep_fault(std::move(given));
                return;
            }
            progress_.done_bytes.fetch_add(length, std::memory_order_relaxed);
        }
    }

    // After the threads have ended.
    const Status& fault() const { return fault_; }

private:
    void keep_fault(Status fault) {
        const std::lock_guard hold(lock_);
        if (fault_.ok()) {
            fault_ = std::move(fault);
        }
        has_failed_ = true;
    }

    Segment& segment_;
    const CommitTerms terms_;
    const std::uint64_t end_;
    const std::uint64_t slice_bytes_;
    PopulateProgress& progress_;
    std::atomic<std::uint64_t> next_;
    std::atomic<bool> has_failed_ = false;
    std::mutex lock_;
    Status fault_;
};

// A thread that has lowered itself may not rise again, so the caller works itself only where it stays as it is.
void fill_by_threads(Filling& filling, unsigned threads, bool is_background) {
    std::vector<std::jthread> others;
    others.reserve(threads);
    try {
        for (unsigned number = is_background ? 0 : 1; number < threads; ++number) {
            others.emplace_back([&filling, is_background] {
                if (is_background) {
                    static_cast<void>(setpriority(PRIO_PROCESS, 0, kNiceness));  // a thread's own, on Linux
                }
                filling.fill();
            });
        }
    } catch (const std::system_error&) {
        // No more threads: those there are do the work.
    }
    if (!is_background || others.empty()) {
        filling.fill();
    }
}

}  // namespace

Result<bool> populate(Segment& segment, const PopulateTerms& terms, PopulateProgress& progress, SegmentRange range) {
    range.offset = std::min(range.offset, segment.size_bytes());
    range.length = std::min(range.length, segment.size_bytes() - range.offset);
    const std::uint64_t before = progress.done_bytes;
    const std::uint64_t missing =
        std::min(range.length, segment.size_bytes() - std::min(segment.size_bytes(), segment.held_bytes()));
    if (missing > 0 && !segment.is_hugetlb()) {
        if (Status room = check_memory_headroom(missing + terms.keep_free_bytes, terms.proc); !room.ok()) {
            return room;
        }
    }
    // Whole huge pages, so that no two threads meet in one.
    const std::uint64_t unit = std::max<std::uint64_t>(segment.page_bytes(), kHugePageBytes);
    const std::uint64_t slice_bytes = std::max<std::uint64_t>(terms.slice_bytes / unit, 1) * unit;
    const std::uint64_t slices = std::max<std::uint64_t>((range.length + slice_bytes - 1) / slice_bytes, 1);
    const auto threads = static_cast<unsigned>(std::clamp<std::uint64_t>(terms.threads, 1, slices));

    Filling filling(segment, terms, range, slice_bytes, progress);
    fill_by_threads(filling, threads, terms.is_background);
    if (!filling.fault().ok()) {
        return filling.fault();
    }
    return progress.done_bytes - before == range.length;
}

Result<std::unique_ptr<SegmentMap>> SegmentMap::open(std::vector<FileDescriptor> files, std::uint64_t segment_bytes) {
    std::vector<Segment> segments;
    segments.reserve(files.size());
    for (FileDescriptor& file : files) {
        Result<Segment> segment = Segment::adopt(std::move(file), {.size_bytes = segment_bytes});
        if (!segment.ok()) {
            return Status(Code::invalid,
                          "segment " + std::to_string(segments.size()) + ": " + segment.fault().message());
        }
        segments.push_back(std::move(segment.value()));
    }
    return std::unique_ptr<SegmentMap>(new SegmentMap(std::move(segments), segment_bytes));
}

SegmentMap::SegmentMap(std::vector<Segment> segments, std::uint64_t segment_bytes)
    : segments_(std::move(segments)), segment_bytes_(segment_bytes) {
    records_.reserve(segments_.size());
    for (Segment& segment : segments_) {
        records_.push_back(segment.writable_bytes());
    }
}

std::vector<std::uint64_t> SegmentMap::bases() const {
    std::vector<std::uint64_t> bases;
    bases.reserve(segments_.size());
    for (const Segment& segment : segments_) {
        bases.push_back(reinterpret_cast<std::uint64_t>(segment.bytes().data()));
    }
    return bases;
}

Result<std::span<std::byte>> SegmentMap::find(std::uint64_t address, std::uint64_t length) const {
    const std::uint64_t index = segment_bytes_ == 0 ? 0 : address / segment_bytes_;
    const std::uint64_t offset = segment_bytes_ == 0 ? 0 : address % segment_bytes_;
    if (index >= segments_.size() || length > segment_bytes_ - offset) {
        return Status(Code::invalid,
                      "no segment has " + std::to_string(length) + " bytes at " + std::to_string(address));
    }
    return records_[index].subspan(offset, length);
}

}  // namespace kvo

#include "disk/segment_files.hpp"

#include <algorithm>
#include <utility>

namespace kvo {
namespace {

constexpr std::chrono::seconds kRoomInterval{60};

auto is_in(SegmentState state) {
    return [state](const SegmentFile& segment) { return segment.state == state; };
}

}  // namespace

SegmentFiles::SegmentFiles(const DeviceTerms& terms, DeviceCounts& counts)
    : terms_(terms),
      counts_(counts),
      segments_(terms.capacity_bytes / terms.segment_bytes),
      budget_(terms.daily_bytes, terms.now(), false) {}

Status SegmentFiles::open() {
    const bool is_first = store_ == 0;
    folder_.reset();
    segments_ = SegmentTable(segments_.size());
    file_count_ = 0;
    refusal_.clear();
    Result<DiskFolder> folder =
        DiskFolder::open({terms_.path, terms_.segment_bytes, terms_.may_create && is_first, store_});
    if (!folder.ok()) {
        return folder.fault();
    }
    store_ = folder.value().store();
    folder_.emplace(std::move(folder.value()));
    if (is_first) {
        budget_ = WriteBudget(terms_.daily_bytes, terms_.now(), folder_->is_new());
    }
    return {};
}

Status SegmentFiles::try_writing() {
    Status probed = folder_->try_writing();
    spend(kIoAlignment);
    if (probed.ok() && !refusal_.empty() && !is_full()) {
        const Result<std::uint32_t> added = add_file();
        return added.ok() ? Status() : added.fault();
    }
    return probed;
}

Status SegmentFiles::open_file(std::uint32_t number) {
    if (number >= segments_.size()) {
        return {Code::unavailable, ""};
    }
    Result<FileDescriptor> file = folder_->open_segment(number);
    if (!file.ok()) {
        return file.fault();
    }
    segments_[number].file = std::move(file.value());
    segments_[number].state = SegmentState::empty;
    ++file_count_;
    return {};
}

Status SegmentFiles::remove_file(std::uint32_t number) {
    Status status = folder_->remove_segment(number);
    if (status.ok() && number < segments_.size() && segments_[number].state != SegmentState::none) {
        segments_[number] = SegmentFile();
        --file_count_;
    }
    return status;
}

bool SegmentFiles::has_any(SegmentState state) const { return std::ranges::any_of(segments_, is_in(state)); }

std::size_t SegmentFiles::empty_count() const {
    return static_cast<std::size_t>(std::ranges::count_if(segments_, [this](const SegmentFile& segment) {
        return segment.state == SegmentState::empty || (segment.state == SegmentState::none && !is_full());
    }));
}

Result<std::uint32_t> SegmentFiles::find_empty() {
    const auto chosen = std::ranges::find_if(segments_, is_in(SegmentState::empty));
    if (chosen != segments_.end()) {
        return static_cast<std::uint32_t>(chosen - segments_.begin());
    }
    return add_file();
}

Result<std::uint32_t> SegmentFiles::add_file() {
    const auto chosen = std::ranges::find_if(segments_, is_in(SegmentState::none));
    const auto number = static_cast<std::uint32_t>(chosen - segments_.begin());
    Result<FileDescriptor> file = folder_->create_segment(number);
    if (!file.ok()) {
        refusal_ = file.fault().code() == Code::unavailable ? file.fault().message() : "";
        refused_at_ = terms_.now();
        return Status(is_full() ? Code::unavailable : Code::failed, file.fault().message());
    }
    refusal_.clear();
    chosen->file = std::move(file.value());
    chosen->state = SegmentState::empty;
    ++file_count_;
    return number;
}

void SegmentFiles::begin_life(std::uint32_t number) {
    SegmentFile& segment = segments_[number];
    segment.state = SegmentState::writing;
    segment.life = {store_, ++generation_};
    segment.removals = 0;
    segment.has_footer = false;
}

void SegmentFiles::go_on_with_life(std::uint32_t number, const SegmentLife& life) {
    segments_[number].state = SegmentState::full;
    segments_[number].life = life;
    generation_ = std::max(generation_, life.generation);
}

void SegmentFiles::ask_for_room(Instant now) {
    if (is_full() && now >= refused_at_ + kRoomInterval) {
        static_cast<void>(add_file());
    }
}

std::string SegmentFiles::shortage() const {
    return is_full() ? refusal_ + "; blocks are kept in the " + std::to_string(file_count_) + " of " +
                           std::to_string(segments_.size()) + " segments for which there is room"
                     : "";
}

void SegmentFiles::spend(std::uint64_t bytes) {
    counts_.written_bytes += bytes;
    budget_.charge(bytes);
}

}  // namespace kvo

#include "replay/replay.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace kvo {

std::size_t ReplayTrace::KeyHash::operator()(const Key& key) const noexcept {
    return spread_bits(spread_bits(key.id) ^ key.parent);
}

Status ReplayTrace::add(std::span<const std::uint64_t> ids) {
    if (ids.size() > std::numeric_limits<std::uint32_t>::max() - references_.size()) {
        return {Code::invalid, "a trace may have 2**32 - 1 block references, this one has more"};
    }
    if (ids.empty()) {
        return {};
    }
    BlockNumber previous = kNoBlock;
    std::uint32_t depth = 0;
    for (const std::uint64_t id : ids) {
        depth += 1;
        const auto [found, is_new] = numbers_.try_emplace({id, previous}, static_cast<BlockNumber>(parents_.size()));
        if (is_new) {
            parents_.push_back(previous);
            depths_.push_back(depth);
        }
        previous = found->second;
        references_.push_back(previous);
    }
    reference_squares_ += std::uint64_t{ids.size()} * ids.size();
    ends_.push_back(static_cast<std::uint32_t>(references_.size()));
    return {};
}

std::span<const BlockNumber> ReplayTrace::request(std::size_t at) const noexcept {
    const std::size_t begin = at == 0 ? 0 : ends_[at - 1];
    return std::span(references_).subspan(begin, ends_[at] - begin);
}

namespace {

// Samples are that many requests apart, more in a long trace: looking costs as much as all blocks together.
constexpr std::size_t kSampleRequests = 200;
constexpr std::size_t kSamples = 100;

class Replay {
public:
    Replay(const ReplayTrace& trace, const ReplayShape& shape, std::uint64_t capacity_bytes, EvictionPolicy& policy)
        : trace_(trace),
          shape_(shape),
          capacity_bytes_(capacity_bytes),
          policy_(policy),
          residents_(shape.size(), std::vector<EntryNumber>(trace.block_count(), kNoEntry)) {}

    Status run();
    const ReplayOutcome& outcome() const noexcept { return outcome_; }

private:
    struct Record {
        std::uint32_t group = 0;
        BlockNumber block = kNoBlock;
    };

    struct Resident {
        Record record;
        std::uint32_t leased_by = 0;  // the last request that did, counted from 1
    };

    using Blocks = std::span<const BlockNumber>;

    bool holds(std::uint32_t group, BlockNumber block) const { return residents_[group][block] != kNoEntry; }
    bool accepts(std::size_t boundary, Blocks blocks) const;
    std::size_t find_boundary(Blocks blocks) const;
    void touch(std::size_t boundary, Blocks blocks);
    void list_missing(std::size_t boundary, Blocks blocks);
    void spare_present(std::size_t boundary, Blocks blocks);
    std::uint64_t cut_missing();
    Status evict_until_free(std::uint64_t size_bytes);
    void evict(EntryNumber entry);
    void admit(Record record);
    void sample();

    const ReplayTrace& trace_;
    const ReplayShape& shape_;
    const std::uint64_t capacity_bytes_;
    EvictionPolicy& policy_;

    std::vector<std::vector<EntryNumber>> residents_;  // by group and block
    std::vector<Resident> entries_;                    // by entry number
    std::vector<EntryNumber> free_;
    std::uint64_t used_bytes_ = 0;

    // State of the running request.
    std::uint32_t request_ = 0;
    std::uint64_t leased_bytes_ = 0;
    std::vector<EntryNumber> touched_;
    std::vector<Record> missing_;

    ReplayOutcome outcome_;
    double useless_sum_ = 0.0;
};

std::uint32_t boundary_blocks(const ReplayShape& shape) {
    std::uint32_t blocks = 1;
    for (const ReplayGroup& group : shape) {
        blocks = group.reuse == Reuse::exact ? std::max(blocks, group.every_blocks) : blocks;
    }
    return blocks;
}

// A boundary needs a group's blocks from here to itself.
std::size_t needed_begin(const ReplayGroup& group, std::size_t boundary) {
    switch (group.reuse) {
        case Reuse::prefix:
            return 0;
        case Reuse::window:
            return boundary - std::min<std::size_t>(boundary, group.window_blocks);
        case Reuse::exact:
            return boundary - 1;
    }
    return 0;
}

Status check_shape(const ReplayShape& shape) {
    const auto is_good = [step = boundary_blocks(shape)](const ReplayGroup& group) {
        return group.size_bytes > 0 && (group.reuse != Reuse::window || group.window_blocks > 0) &&
               (group.reuse != Reuse::exact || group.every_blocks == step);
    };
    if (shape.empty() || shape[0].reuse != Reuse::prefix || !std::ranges::all_of(shape, is_good)) {
        return {Code::invalid,
                "a shape begins with a prefix group, has sizes and windows above 0, and states at one distance"};
    }
    return {};
}

bool Replay::accepts(std::size_t boundary, Blocks blocks) const {
    for (std::uint32_t group = 1; group < shape_.size(); ++group) {
        const std::size_t begin = needed_begin(shape_[group], boundary);
        for (std::size_t at = boundary; at-- > begin;) {
            if (!holds(group, blocks[at])) {
                return false;
            }
        }
    }
    return true;
}

std::size_t Replay::find_boundary(Blocks blocks) const {
    std::size_t present = 0;
    while (present < blocks.size() && holds(0, blocks[present])) {
        ++present;
    }
    const std::size_t step = boundary_blocks(shape_);
    std::size_t boundary = present - present % step;
    while (boundary > 0 && !accepts(boundary, blocks)) {
        boundary -= step;
    }
    return boundary;
}

// Leases and touches the records that an acquire of the boundary would, in the same order.
void Replay::touch(std::size_t boundary, Blocks blocks) {
    touched_.clear();
    leased_bytes_ = 0;
    for (std::uint32_t group = 0; group < shape_.size() && boundary > 0; ++group) {
        const std::size_t begin = needed_begin(shape_[group], boundary);
        for (std::size_t at = begin; at < boundary; ++at) {
            const EntryNumber entry = residents_[group][blocks[at]];
            entries_[entry].leased_by = request_;
            leased_bytes_ += shape_[group].size_bytes;
            touched_.push_back(entry);
        }
    }
    if (!touched_.empty()) {
        policy_.touch(touched_);
    }
}

// Lists the records behind the boundary that the request computes and the memory does not have.
void Replay::list_missing(std::size_t boundary, Blocks blocks) {
    missing_.clear();
    for (std::uint32_t group = 0; group < shape_.size(); ++group) {
        const std::size_t step = shape_[group].reuse == Reuse::exact ? shape_[group].every_blocks : 1;
        for (std::size_t at = boundary; at < blocks.size(); ++at) {
            if ((at + 1) % step == 0 && !holds(group, blocks[at])) {
                missing_.push_back({group, blocks[at]});
            }
        }
    }
}

// Spares the records that the request computes though they are here already: the missing records hang on them.
void Replay::spare_present(std::size_t boundary, Blocks blocks) {
    for (std::uint32_t group = 0; group < shape_.size(); ++group) {
        for (std::size_t at = boundary; at < blocks.size(); ++at) {
            if (holds(group, blocks[at])) {
                policy_.spare(residents_[group][blocks[at]]);
            }
        }
    }
}

// Cuts the list to the first records that fit next to the leased ones, and returns their size.
std::uint64_t Replay::cut_missing() {
    std::uint64_t size_bytes = 0;
    for (std::size_t at = 0; at < missing_.size(); ++at) {
        const std::uint64_t more = shape_[missing_[at].group].size_bytes;
        if (leased_bytes_ + size_bytes + more > capacity_bytes_) {
            outcome_.refused += missing_.size() - at;
            missing_.resize(at);
            break;
        }
        size_bytes += more;
    }
    return size_bytes;
}

Status Replay::evict_until_free(std::uint64_t size_bytes) {
    // A policy that was told to keep each entry twice and still offers leased ones never offers another.
    std::size_t keeps_left = 2 * (entries_.size() - free_.size());
    while (used_bytes_ + size_bytes > capacity_bytes_) {
        const EntryNumber victim = policy_.choose_victim();
        if (victim >= entries_.size() || entries_[victim].record.block == kNoBlock) {
            return {Code::failed, "the policy chose " + std::to_string(victim) + ", which is not here"};
        }
        if (entries_[victim].leased_by != request_) {
            evict(victim);
        } else if (keeps_left-- > 0) {
            policy_.keep(victim);
        } else {
            return {Code::failed, "the policy chose leased entries only"};
        }
    }
    return {};
}

void Replay::evict(EntryNumber entry) {
    Resident& resident = entries_[entry];
    policy_.remove(entry, true);
    residents_[resident.record.group][resident.record.block] = kNoEntry;
    used_bytes_ -= shape_[resident.record.group].size_bytes;
    resident.record.block = kNoBlock;
    free_.push_back(entry);
    outcome_.evicted += 1;
}

void Replay::admit(Record record) {
    if (free_.empty()) {
        free_.push_back(static_cast<EntryNumber>(entries_.size()));
        entries_.emplace_back();
    }
    const EntryNumber entry = free_.back();
    free_.pop_back();
    entries_[entry] = {record, request_};
    residents_[record.group][record.block] = entry;
    const ReplayGroup& group = shape_[record.group];
    used_bytes_ += group.size_bytes;
    outcome_.peak_bytes = std::max(outcome_.peak_bytes, used_bytes_);
    outcome_.admitted += 1;

    const BlockNumber before = record.group == 0 ? trace_.parent(record.block) : record.block;
    Admission admission;
    admission.entry = entry;
    admission.parent = before == kNoBlock ? kNoEntry : residents_[0][before];
    admission.name = spread_bits((std::uint64_t{record.group} << 32) | record.block);
    admission.size_bytes = group.size_bytes;
    admission.reuse = group.reuse;
    admission.needs_state = record.group == 0 && boundary_blocks(shape_) > 1;
    admission.window_blocks = group.window_blocks;
    policy_.admit(admission);
}

void Replay::sample() {
    const auto holds_record = [this](std::uint32_t group, BlockNumber block) { return holds(group, block); };
    const std::uint64_t useful = useful_bytes(trace_, shape_, boundary_blocks(shape_), holds_record);
    useless_sum_ += 1.0 - static_cast<double>(useful) / static_cast<double>(std::max<std::uint64_t>(used_bytes_, 1));
    outcome_.samples += 1;
    outcome_.useless_share = useless_sum_ / static_cast<double>(outcome_.samples);
}

Status Replay::run() {
    const std::size_t apart = std::max(kSampleRequests, trace_.request_count() / kSamples);
    for (std::size_t at = 0; at < trace_.request_count(); ++at) {
        const Blocks blocks = trace_.request(at);
        request_ = static_cast<std::uint32_t>(at + 1);
        const std::size_t boundary = find_boundary(blocks);
        outcome_.hits += boundary;
        outcome_.hit_squares += std::uint64_t{boundary} * boundary;
        touch(boundary, blocks);
        list_missing(boundary, blocks);
        spare_present(boundary, blocks);
        if (Status status = evict_until_free(cut_missing()); !status.ok()) {
            return status;
        }
        for (const Record& record : missing_) {
            admit(record);
        }
        if (outcome_.evicted > 0 && (at + 1) % apart == 0) {
            sample();
        }
    }
    return {};
}

}  // namespace

ReplayShape plain_shape() { return {ReplayGroup{}}; }

ReplayShape hybrid_shape() {
    return {ReplayGroup{.reuse = Reuse::prefix, .size_bytes = 4},
            ReplayGroup{.reuse = Reuse::window, .size_bytes = 2, .window_blocks = 4},
            ReplayGroup{.reuse = Reuse::exact, .size_bytes = 16, .every_blocks = 8}};
}

std::uint64_t total_bytes(const ReplayTrace& trace, const ReplayShape& shape) {
    std::uint64_t total = 0;
    for (const ReplayGroup& group : shape) {
        const std::uint32_t step = group.reuse == Reuse::exact ? group.every_blocks : 1;
        for (BlockNumber block = 0; block < trace.block_count(); ++block) {
            total += trace.depth(block) % step == 0 ? group.size_bytes : 0;
        }
    }
    return total;
}

PolicyBounds replay_bounds(const ReplayShape& shape, std::uint64_t capacity_bytes) {
    std::uint64_t smallest = capacity_bytes;
    for (const ReplayGroup& group : shape) {
        smallest = std::min(smallest, group.size_bytes);
    }
    const std::uint64_t entries = capacity_bytes / std::max<std::uint64_t>(smallest, 1);
    return {static_cast<EntryNumber>(std::min<std::uint64_t>(entries, kNoEntry - 1)), capacity_bytes};
}

Result<ReplayOutcome> replay(const ReplayTrace& trace, const ReplayShape& shape, std::uint64_t capacity_bytes,
                             EvictionPolicy& policy) {
    if (Status status = check_shape(shape); !status.ok()) {
        return status;
    }
    Replay run(trace, shape, capacity_bytes, policy);
    if (Status status = run.run(); !status.ok()) {
        return status;
    }
    return run.outcome();
}

namespace {

using Holds = std::function<bool(std::uint32_t, BlockNumber)>;
using Marks = std::vector<std::vector<bool>>;  // by group and block

// Blocks that a boundary at `block` needs of a group that is not a prefix; false: `visit` refused one.
template <typename Visit>
bool each_needed(const ReplayTrace& trace, const ReplayGroup& group, BlockNumber block, Visit visit) {
    std::uint32_t blocks = group.reuse == Reuse::window ? group.window_blocks : 1;
    for (; blocks > 0 && block != kNoBlock; --blocks, block = trace.parent(block)) {
        if (!visit(block)) {
            return false;
        }
    }
    return true;
}

// The boundary at `block` is reached by all prefix groups; if the others accept it too, marks what they need.
bool mark_boundary(const ReplayTrace& trace, const ReplayShape& shape, BlockNumber block, const Holds& holds,
                   Marks& useful) {
    for (const bool is_marking : {false, true}) {
        for (std::uint32_t group = 0; group < shape.size(); ++group) {
            if (shape[group].reuse == Reuse::prefix) {
                continue;
            }
            const bool accepts = each_needed(trace, shape[group], block, [&](BlockNumber needed) {
                if (is_marking) {
                    useful[group][needed] = true;
                }
                return holds(group, needed);
            });
            if (!accepts) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace

std::uint64_t useful_bytes(const ReplayTrace& trace, const ReplayShape& shape, std::uint32_t boundary_blocks,
                           const Holds& holds) {
    const auto block_count = static_cast<BlockNumber>(trace.block_count());
    Marks useful(shape.size(), std::vector<bool>(block_count));
    // Parents have the lower numbers: one way through the blocks finds what is reached, the way back what is needed.
    std::vector<bool> is_reached(block_count);
    std::vector<bool> is_needed(block_count);
    for (BlockNumber block = 0; block < block_count; ++block) {
        const BlockNumber parent = trace.parent(block);
        bool reaches = parent == kNoBlock || is_reached[parent];
        for (std::uint32_t group = 0; group < shape.size() && reaches; ++group) {
            reaches = shape[group].reuse != Reuse::prefix || holds(group, block);
        }
        is_reached[block] = reaches;
        is_needed[block] =
            reaches && trace.depth(block) % boundary_blocks == 0 && mark_boundary(trace, shape, block, holds, useful);
    }
    std::uint64_t bytes = 0;
    for (BlockNumber block = block_count; block-- > 0;) {
        if (is_needed[block] && trace.parent(block) != kNoBlock) {
            is_needed[trace.parent(block)] = true;
        }
        for (std::uint32_t group = 0; group < shape.size(); ++group) {
            const bool counts = shape[group].reuse == Reuse::prefix ? is_needed[block] : useful[group][block];
            bytes += counts ? shape[group].size_bytes : 0;
        }
    }
    return bytes;
}

}  // namespace kvo

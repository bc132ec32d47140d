#include "disk/device.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

#include "disk/recovery.hpp"
#include "io/io_engine.hpp"

namespace kvo {

Device::Device(DeviceTerms terms, std::unique_ptr<IoEngine> engine, AlignedMemory read_memory,
               AlignedMemory write_memory)
    : terms_(std::move(terms)),
      runner_(std::move(engine), terms_.write_depth),
      condition_(terms_),
      files_(terms_, counts_),
      index_(files_.count()),
      coding_(terms_.coding),
      losses_({.terms = terms_,
               .runner = runner_,
               .files = files_,
               .index = index_,
               .counts = counts_,
               .condition = condition_,
               .give = [this](const BatchPointer& batch) { add_all(batch); }}),
      reader_({.terms = terms_,
               .runner = runner_,
               .segments = files_.table(),
               .index = index_,
               .counts = counts_,
               .coding = coding_,
               .told = [this](std::uint32_t segment, int error) { losses_.told_read(segment, error); },
               .lost = [this](const LostRecord& record, int error) { losses_.told_lost(record, error); }},
              std::move(read_memory)),
      evictor_({.terms = terms_,
                .files = files_,
                .io = SegmentIo(terms_, runner_, files_, counts_),
                .index = index_,
                .counts = counts_,
                .condition = condition_,
                .give = [this](const BatchPointer& batch) { add_all(batch); }}),
      open_segments_({.terms = terms_,
                      .runner = runner_,
                      .files = files_,
                      .index = index_,
                      .counts = counts_,
                      .condition = condition_},
                     std::move(write_memory)),
      writer_({.terms = terms_,
               .files = files_,
               .index = index_,
               .counts = counts_,
               .condition = condition_,
               .evictor = evictor_,
               .losses = losses_,
               .open = open_segments_,
               .coding = coding_}) {}

Device::~Device() {
    if (!runner_.close(0)) {
        reader_.abandon_memory();
        open_segments_.abandon_memory();
    }
}

Result<std::unique_ptr<Device>> Device::create(DeviceTerms terms) {
    if (Status status = check_terms(terms); !status.ok()) {
        return status;
    }
    std::unique_ptr<IoEngine> engine;
    if (terms.make_engine) {
        Result<std::unique_ptr<IoEngine>> made = terms.make_engine();
        if (!made.ok()) {
            return made.fault();
        }
        engine = std::move(made.value());
    } else {
        Result<MadeEngine> made = make_io_engine(terms.io_engine, terms.io_depth);
        if (!made.ok()) {
            return made.fault();
        }
        engine = std::move(made.value().engine);
    }
    // Enough buffers for the largest record, for the writes that are under way, and for the buffer that is being
    // filled.
    const std::size_t write_buffers =
        record_footprint(most_stored(terms, terms.record_limit_bytes)) / terms.write_buffer_bytes + 2 +
        2 * terms.write_depth;
    Result<AlignedMemory> read_memory = AlignedMemory::create(terms.read_buffers * terms.read_piece_bytes);
    Result<AlignedMemory> write_memory = AlignedMemory::create(write_buffers * terms.write_buffer_bytes);
    if (!read_memory.ok() || !write_memory.ok()) {
        return (read_memory.ok() ? write_memory : read_memory).fault();
    }
    return std::unique_ptr<Device>(new Device(std::move(terms), std::move(engine), std::move(read_memory.value()),
                                              std::move(write_memory.value())));
}

void Device::add(DevicePart part) {
    const bool is_get = part.batch->verb == DiskVerb::get;
    if (is_get && can_read()) {
        reader_.add(part.batch, part.items);
    } else if (!is_get && can_write()) {
        writer_.add(std::move(part));
    } else {
        for (const std::uint32_t item : part.items) {
            part.batch->end(item, DiskOutcome::unavailable);
        }
    }
}

void Device::add_all(const BatchPointer& batch) {
    std::vector<std::uint32_t> items(batch->size());
    std::iota(items.begin(), items.end(), 0);
    add({batch, std::move(items)});
}

Instant Device::step() {
    const Instant now = terms_.now();
    runner_.poll(now);
    look_after(now);
    reader_.pump();
    losses_.pump();
    evictor_.pump();
    writer_.pump();
    open_segments_.maintain(now);
    const bool has_ended = runner_.poll(now) > 0;  // and what was asked for in this step begins in this step
    publish();
    if (has_ended || writer_.has_coded_enough()) {
        return now;
    }
    const Instant wake =
        std::min({condition_.next_probe(), runner_.queue().next_deadline(), open_segments_.next_wake()});
    return evictor_.is_under_way() ? std::min(wake, now + std::chrono::milliseconds(1)) : wake;
}

void Device::look_after(Instant now) {
    if (const std::string problem = condition_.take_read_problem(); !problem.empty()) {
        become_absent(problem);
    }
    if (const std::string problem = condition_.take_write_problem(); !problem.empty()) {
        become_read_only(problem);
    }
    if (now < condition_.next_probe()) {
        return;
    }
    const DeviceState state = condition_.state();
    if (state == DeviceState::opening || state == DeviceState::absent) {
        open();
    } else if (const Status status = files_.check(); !status.ok()) {
        become_absent(status.message());
    } else if (state == DeviceState::read_only) {
        const Status probed = files_.try_writing();
        condition_.set(probed.ok() ? DeviceState::ready : DeviceState::read_only, probed.message());
    } else {
        files_.ask_for_room(now);
    }
    condition_.probe_next();
}

void Device::open() {
    const bool is_quiet = runner_.queue().pending() == runner_.queue().held() && open_segments_.are_sealed();
    if (!is_quiet) {
        return;  // the files stay open under what is still to be done with them
    }
    reader_.give_up(DiskOutcome::unavailable);
    if (const Status status = files_.open(); !status.ok()) {
        condition_.set(DeviceState::absent, status.message());
        return;
    }
    const SegmentIo io(terms_, runner_, files_, counts_);
    if (const Status status = DeviceRecovery(terms_, files_, io, index_, counts_).run(); !status.ok()) {
        become_absent(status.message());
        return;
    }
    losses_.begin();
    reader_.begin();
    condition_.set(DeviceState::ready, {});
}

void Device::become_read_only(const std::string& reason) {
    if (condition_.state() == DeviceState::ready) {
        condition_.set(DeviceState::read_only, reason);
        drop_writes(DiskOutcome::failed);
        condition_.probe_later();
    }
}

// Writes that are not durable yet end with `outcome`; durable records stay readable.
void Device::drop_writes(DiskOutcome outcome) {
    writer_.give_up();
    evictor_.stop();
    open_segments_.drop(outcome);
}

void Device::become_absent(const std::string& reason) {
    condition_.set(DeviceState::absent, reason);
    drop_writes(DiskOutcome::unavailable);
    reader_.give_up(DiskOutcome::unavailable);
    const std::lock_guard hold(index_.lock);
    index_.index.clear();
    losses_.forget_suspects();
    condition_.probe_later();
}

void Device::publish() {
    DeviceHealth health;
    health.reason = files_.shortage();
    health.io_engine = runner_.queue().engine_name();
    health.capacity_bytes = segment_count() * terms_.segment_bytes;
    health.counts = counts_;
    health.segments = files_.file_count();
    health.live_bytes = index_.index.live_bytes();
    health.records = index_.index.size();
    health.index_bytes = index_.index.memory_bytes();
    condition_.publish(std::move(health));
}

bool Device::close(int timeout_ms) {
    const Instant end = terms_.now() + std::chrono::milliseconds(timeout_ms);
    // Writes the last records too, as far as there are buffers; coding them may take more than one step.
    while (writer_.has_coded_enough() && can_write() && terms_.now() < end) {
        writer_.pump();
    }
    condition_.end();
    writer_.give_up();
    evictor_.stop();
    reader_.give_up(DiskOutcome::unavailable);
    open_segments_.seal();
    while (!open_segments_.are_sealed() && terms_.now() < end) {
        const Instant now = terms_.now();
        runner_.poll(now);
        open_segments_.maintain(now);
        if (runner_.poll(now) == 0 && !open_segments_.are_sealed()) {
            wait_readable(file(), 10);
        }
    }
    const bool is_over = runner_.close(static_cast<int>(
        std::max<std::int64_t>(0, std::chrono::duration_cast<std::chrono::milliseconds>(end - terms_.now()).count())));
    open_segments_.drop(DiskOutcome::failed);
    if (is_over) {
        files_.close();
    }
    return is_over;
}

std::vector<FooterEntry> Device::list_segment(std::uint32_t number) {
    if (!can_read() || number >= segment_count()) {
        return {};
    }
    std::vector<FooterEntry> entries;
    const SegmentFile& segment = files_[number];
    if (segment.state == SegmentState::writing) {
        entries = open_segments_.entries(number);
    } else if (segment.state == SegmentState::full || segment.state == SegmentState::leaving) {
        int error = 0;
        if (auto found = SegmentIo(terms_, runner_, files_, counts_).find(number, error)) {
            entries = std::move(found->entries);
        }
    }
    const std::lock_guard hold(index_.lock);
    std::erase_if(entries, [&](const FooterEntry& entry) {
        const RecordPlace place = place_of(number, entry);
        const std::optional<RecordPlace> known = index_.index.find(mark_of(entry.key));
        return entry.flag != RecordFlag::none || !known || !(*known == place);
    });
    return entries;
}

}  // namespace kvo

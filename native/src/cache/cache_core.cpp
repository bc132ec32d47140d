#include "cache/cache_core.hpp"

#include <sys/random.h>

#include <algorithm>
#include <string_view>
#include <utility>

#include "base/size_text.hpp"
#include "cache/index_reader.hpp"
#include "shim/memory_headroom.hpp"
#include "shim/system_fault.hpp"

namespace kvo {
namespace {

constexpr std::uint64_t kPoolLimit = 1ULL << 56;

// Of the machine's memory, or the cgroup's, one part in so many is left to others by a pool that grows.
constexpr std::uint64_t kReserveShare = 32;
constexpr std::uint32_t kRoomWaitS = 2;

Result<std::uint64_t> random_number() {
    std::uint64_t number = 0;
    if (getrandom(&number, sizeof(number), 0) != static_cast<ssize_t>(sizeof(number))) {
        return system_fault("the kernel gives no random number", errno);
    }
    return number;
}

Status check_owner(const CacheOwner& owner) {
    if (owner.domain.size() >= kDomainBytes || owner.domain.find('\0') != std::string::npos) {
        return {Code::invalid, "a domain's name has at most " + std::to_string(kDomainBytes - 1) +
                                   " bytes and no zeros, not " + std::to_string(owner.domain.size())};
    }
    return {};
}

Status check_policy(const CacheOptions& options) {
    return options.policy ? Status() : Status(Code::invalid, "a cache needs a policy that says what goes first");
}

Status check_options(const CacheOptions& options) {
    if (options.pool_bytes == 0 || options.entry_limit == 0) {
        return {Code::invalid, "a cache needs memory for at least one segment and one entry"};
    }
    if (options.entry_limit > kEntryLimitMax) {
        return {Code::invalid, "a cache has at most " + std::to_string(kEntryLimitMax) + " entries"};
    }
    if (options.pool_bytes > kPoolLimit || options.segment_bytes > kPoolLimit) {
        return {Code::invalid, "a cache of " + std::to_string(options.pool_bytes) + " bytes in segments of " +
                                   std::to_string(options.segment_bytes) + " is more than any machine has"};
    }
    if (Status owner = check_owner(options.owner); !owner.ok()) {
        return owner;
    }
    // Whatever would refuse them after the memory has been taken, which takes long.
    if (const auto arena = Arena::create({options.segment_bytes, options.extent_bytes}); !arena.ok()) {
        return arena.fault();
    }
    return check_policy(options);
}

// What no waiting brings is refused at once; what others have now may be given back.
Status check_total(const CacheOptions& options, std::uint64_t pool_bytes) {
    const std::uint64_t total = read_memory_headroom(options.populate.proc).total_bytes;
    const std::uint64_t wanted = pool_bytes + std::min(options.populate.keep_free_bytes, UINT64_MAX - pool_bytes);
    if (options.is_sparse || wanted <= total) {
        return {};
    }
    return {Code::unavailable,
            describe_size(wanted) + " of memory are not there: " + describe_size(total) + " is all there is"};
}

constexpr std::uint64_t mix(std::uint64_t mark, std::uint64_t word) {
    mark = (mark ^ word) * 0x9e3779b97f4a7c15;
    return mark ^ mark >> 32;
}

// Tells the files of one pool in their order from any others, and from another order.
Result<std::uint64_t> mark_segments(const std::vector<Segment>& segments) {
    std::uint64_t mark = segments.size();
    for (const Segment& segment : segments) {
        const auto file = mark_file(segment.file());
        if (!file.ok()) {
            return file;
        }
        mark = mix(mark, file.value());
    }
    return mark;
}

// Whether the memory is of the same domain, and nobody had it who may not have it now.
Status check_former_owner(const IndexHeader& header, const CacheOptions& options) {
    const auto name_end = std::ranges::find(header.domain, '\0');
    if (std::string_view(header.domain.begin(), name_end) != options.owner.domain) {
        return {Code::invalid, "the memory is another domain's"};
    }
    if (options.former_boot_id != 0 && header.boot_id.load() != options.former_boot_id) {
        return {Code::invalid, "the memory is of another server than was said"};
    }
    const auto& admitted = options.owner.users;
    const std::uint32_t count = header.user_count.load();
    if (!admitted) {
        return {};
    }
    if (count > kUserLimit) {
        return {Code::invalid, "more than " + std::to_string(kUserLimit) + " users had the memory"};
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        if (const std::uint32_t uid = header.users[i].load(); std::ranges::find(*admitted, uid) == admitted->end()) {
            return {Code::invalid, "user " + std::to_string(uid) + " had the memory, and may not use the domain"};
        }
    }
    return {};
}

}  // namespace

Result<std::unique_ptr<CacheCore>> CacheCore::create(const CacheOptions& options, PopulateProgress& progress) {
    if (Status status = check_options(options); !status.ok()) {
        return status;
    }
    const std::uint64_t count = (options.pool_bytes + options.segment_bytes - 1) / options.segment_bytes;
    if (Status status = check_total(options, count * options.segment_bytes); !status.ok()) {
        return status;
    }
    auto lock_file = make_lock_file();
    if (!lock_file.ok()) {
        return lock_file.fault();
    }
    auto lock = FileLock::take(lock_file.value());
    if (!lock.ok()) {
        return lock.fault();
    }
    const auto seed = random_number();
    if (!seed.ok()) {
        return seed.fault();
    }
    auto index = IndexFile::create({.entry_limit = options.entry_limit,
                                    .segment_bytes = options.segment_bytes,
                                    .extent_bytes = options.extent_bytes},
                                   seed.value());
    if (!index.ok()) {
        return index.fault();
    }
    std::vector<Segment> segments;
    for (std::uint64_t i = 0; i < count; ++i) {
        auto segment = Segment::create(
            {.size_bytes = options.segment_bytes, .huge_pages = options.huge_pages, .placement = options.placement});
        if (!segment.ok()) {
            return segment.fault();
        }
        segments.push_back(std::move(segment.value()));
    }
    const auto mark = mark_segments(segments);
    if (!mark.ok()) {
        return mark.fault();
    }
    const auto lock_mark = mark_file(lock.value().name());
    if (!lock_mark.ok()) {
        return lock_mark.fault();
    }
    IndexHeader& header = *index.value().view().header;
    header.segments_mark = mark.value();
    header.lock_mark = lock_mark.value();
    std::ranges::copy(options.owner.domain, header.domain.begin());
    header.segment_count.store(static_cast<std::uint32_t>(count));
    header.ready_bytes.store(options.is_sparse ? count * options.segment_bytes : 0);
    auto core = assemble(std::move(lock.value()), std::move(index.value()), std::move(segments), options);
    if (!core.ok()) {
        return core;
    }
    if (Status status = core.value()->store_.start(); !status.ok()) {
        return status;
    }
    if (!options.is_sparse) {
        if (const auto first = core.value()->add_step(options.populate, progress); !first.ok()) {
            return first.fault();
        }
    }
    return core;
}

Result<bool> CacheCore::grow(PopulateProgress& progress) {
    const std::lock_guard one_at_a_time(growing_);
    if (ready_bytes() == capacity_bytes()) {
        return false;
    }
    PopulateTerms terms = options_.populate;
    terms.is_background = true;
    terms.slice_bytes = options_.step_bytes / std::max(terms.threads, 1U);
    const std::uint64_t total = read_memory_headroom(terms.proc).total_bytes;
    terms.keep_free_bytes = std::max(terms.keep_free_bytes, total == UINT64_MAX ? 0 : total / kReserveShare);
    expect_room(kRoomWaitS);
    const auto grown = add_step(terms, progress);
    if (!grown.ok() || !grown.value()) {
        expect_room(0);
    }
    return grown;
}

Status CacheCore::grow_fully(PopulateProgress& progress) {
    for (;;) {
        const auto grown = grow(progress);
        if (!grown.ok() || !grown.value()) {
            return grown.ok() ? Status() : grown.fault();
        }
    }
}

void CacheCore::expect_room(std::uint32_t seconds) {
    const std::lock_guard lock(writer_);
    store_.expect_room(seconds);
}

// Whoever dies after the memory was counted and before it was used has left nothing that is not so.
Result<bool> CacheCore::add_step(PopulateTerms terms, PopulateProgress& progress) {
    const std::uint64_t before = ready_bytes();
    const auto end = take_step(std::move(terms), progress);
    if (!end.ok()) {
        return end.fault();
    }
    const std::lock_guard lock(writer_);
    view_.header->ready_bytes.store(end.value(), std::memory_order_release);
    if (Status status = store_.add_extents((end.value() - before) / view_.header->extent_bytes); !status.ok()) {
        return status;
    }
    return end.value() < capacity_bytes();
}

// Where the ready memory ends then.
Result<std::uint64_t> CacheCore::take_step(PopulateTerms terms, PopulateProgress& progress) {
    const IndexHeader& header = *view_.header;
    // Up to all there is.
    terms.keep_free_bytes = std::min(terms.keep_free_bytes, kPoolLimit);
    std::uint64_t at = ready_bytes();
    const std::uint64_t extents = std::max<std::uint64_t>(options_.step_bytes / header.extent_bytes, 1);
    const std::uint64_t end = std::min(at + extents * header.extent_bytes, capacity_bytes());
    while (at < end) {
        Segment& segment = segments_[at / header.segment_bytes];
        const std::uint64_t offset = at % header.segment_bytes;
        const std::uint64_t length = std::min(end - at, header.segment_bytes - offset);
        const auto populated = populate(segment, terms, progress, {.offset = offset, .length = length});
        if (!populated.ok()) {
            return populated.fault();
        }
        if (!populated.value()) {
            return Status(Code::failed, "taking the memory was cancelled");
        }
        at += length;
    }
    return end;
}

Result<std::unique_ptr<CacheCore>> CacheCore::adopt(CacheFiles files, const CacheOptions& options) {
    if (Status status = check_policy(options); !status.ok()) {
        return status;
    }
    auto lock = FileLock::adopt(files.lock);
    if (!lock.ok()) {
        return lock.fault();
    }
    auto index = IndexFile::adopt(std::move(files.index));
    if (!index.ok()) {
        return index.fault();
    }
    const IndexHeader& header = *index.value().view().header;
    const auto lock_mark = mark_file(lock.value().name());
    if (!lock_mark.ok() || lock_mark.value() != header.lock_mark) {
        return Status(Code::invalid, "the lock is not the index's own");
    }
    if (Status status = check_former_owner(header, options); !status.ok()) {
        return status;
    }
    if (header.segment_count.load() != files.segments.size()) {
        return Status(Code::invalid, "the index is of " + std::to_string(header.segment_count.load()) +
                                         " segments, not of " + std::to_string(files.segments.size()));
    }
    if (const std::uint64_t ready = header.ready_bytes.load(); header.extent_bytes == 0 ||
                                                               ready % header.extent_bytes != 0 ||
                                                               ready > files.segments.size() * header.segment_bytes) {
        return Status(Code::invalid, "the index says that " + std::to_string(ready) + " bytes are ready");
    }
    std::vector<Segment> segments;
    for (FileDescriptor& file : files.segments) {
        auto segment = Segment::adopt(
            std::move(file), {.size_bytes = header.segment_bytes, .huge_pages = options.huge_pages, .is_own = true});
        if (!segment.ok()) {
            return segment.fault();
        }
        segments.push_back(std::move(segment.value()));
    }
    const auto mark = mark_segments(segments);
    if (!mark.ok()) {
        return mark.fault();
    }
    if (mark.value() != header.segments_mark) {
        return Status(Code::invalid, "these segments are not the index's own, or not in their order");
    }
    auto assembled = assemble(std::move(lock.value()), std::move(index.value()), std::move(segments), options);
    if (!assembled.ok()) {
        return assembled;
    }
    CacheCore& core = *assembled.value();
    if (Status status = core.take_over(); !status.ok()) {
        return status;
    }
    return assembled;
}

Result<std::unique_ptr<CacheCore>> CacheCore::assemble(FileLock lock, IndexFile index, std::vector<Segment> segments,
                                                       const CacheOptions& options) {
    const IndexHeader& header = *index.view().header;
    auto arena = Arena::create({.segment_bytes = header.segment_bytes, .extent_bytes = header.extent_bytes});
    if (!arena.ok()) {
        return arena.fault();
    }
    // A successor's policies, too, are those of a pool that has grown fully.
    const std::uint64_t capacity = segments.size() * header.segment_bytes;
    if (Status status = arena.value().reserve(capacity / header.extent_bytes); !status.ok()) {
        return status;
    }
    const auto ready_extents = static_cast<std::uint32_t>(header.ready_bytes.load() / header.extent_bytes);
    if (Status status = arena.value().add_extents(ready_extents); !status.ok()) {
        return status;
    }
    auto tenants =
        TenantTable::create(index.view().tenants, options.policy,
                            {.entry_limit = header.entry_limit, .capacity_bytes = capacity}, options.tenants);
    std::uint64_t boot_id = options.owner.boot_id;
    if (boot_id == 0) {
        const auto drawn = random_number();
        if (!drawn.ok()) {
            return drawn.fault();
        }
        boot_id = drawn.value();
    }
    index.view().header->boot_id.store(boot_id);
    return std::unique_ptr<CacheCore>(new CacheCore(std::move(lock), std::move(index), std::move(segments), options,
                                                    std::move(tenants), std::move(arena.value())));
}

CacheCore::CacheCore(FileLock lock, IndexFile index, std::vector<Segment> segments, const CacheOptions& options,
                     TenantTable tenants, Arena arena)
    : lock_(std::move(lock)),
      index_(std::move(index)),
      view_(index_.view()),
      segments_(std::move(segments)),
      options_(options),
      namespaces_(view_, [this](const Region& region, std::uint64_t count) { return index_.ensure(region, count); }),
      sessions_(
          view_, [this](const Region& region, std::uint64_t count) { return index_.ensure(region, count); },
          [this](std::uint16_t place) { return index_.has_sign(place); }),
      leases_(view_, [this](const Region& region, std::uint64_t count) { return index_.ensure(region, count); }),
      store_(index_, segments_, namespaces_, std::move(tenants), std::move(arena)) {}

Status CacheCore::take_over() {
    const std::lock_guard lock(writer_);
    namespaces_.adopt();
    sessions_.adopt();
    const EntryNumber entries = view_.header->entry_count.load();
    // What the entries say about their leases may be half an acquire or half a release; the lists are whole.
    std::vector<std::uint32_t> leased(entries);
    leases_.adopt([&](std::uint32_t session, std::span<const EntryNumber> list) {
        const bool is_sound = sessions_.is_known(session) &&
                              std::ranges::all_of(list, [&](EntryNumber entry) { return entry < entries; });
        for (const EntryNumber entry : is_sound ? list : std::span<const EntryNumber>{}) {
            ++leased[entry];
        }
        return is_sound;
    });
    const auto report = store_.adopt([&](EntryNumber entry) { return leased[entry]; },
                                     [&](std::uint16_t place) { return sessions_.at(place) != 0; });
    if (!report.ok()) {
        return report.fault();
    }
    adoption_ = report.value();
    // Engines name their identities anew to a successor, so those of nobody's blocks may go before they are too many.
    if (namespaces_.known() > kNamespaceLimit / 2) {
        namespaces_.forget([this](std::uint32_t number) { return !has_entries(number); });
    }
    // Not before: by now no entry has a number that was another tenant's.
    for (const TenantTerms& tenant : options_.tenants.value_or(std::vector<TenantTerms>{})) {
        if (const auto opened = store_.tenants().open(tenant.name, tenant.quota_bytes); !opened.ok()) {
            return opened.fault();
        }
    }
    for (EntryNumber entry = 0; entry < entries; ++entry) {
        const EntryWord word(view_.entries[entry].word.load());
        if (word.state() == EntryState::reserved) {
            const std::uint16_t place = Reservation::of(view_.entries[entry].recency.load()).session;
            reserved_by_place_[place].fetch_add(1);
            sessions_.charge_adopted(place, store_.slot_bytes(entry).size());
        }
    }
    for (std::uint16_t place = 0; place < kSessionLimit; ++place) {
        if (const SessionId session = sessions_.at(place); session != 0) {
            adopt_leases(session);
        }
    }
    return {};
}

// A lease on an entry that could not be kept is none: its number will be another entry's.
void CacheCore::adopt_leases(SessionId session) {
    const auto is_held = [&](EntryNumber entry) { return EntryWord(view_.entries[entry].word.load()).leases() != 0; };
    for (const LeaseId lease : leases_.list(session)) {
        bool is_sound = true;
        leases_.each_entry(lease, [&](EntryNumber entry) { is_sound = is_sound && is_held(entry); });
        std::vector<EntryNumber> entries;
        if (!is_sound && leases_.close(lease, session, entries)) {
            for (const EntryNumber entry : entries) {
                if (is_held(entry)) {
                    view_.entries[entry].word.fetch_sub(1);
                    store_.end_quarantine(entry);
                }
            }
            continue;
        }
        std::uint64_t bytes = 0;
        leases_.each_entry(lease, [&](EntryNumber entry) { bytes += store_.slot_bytes(entry).size(); });
        sessions_.charge_adopted(session_place(session), bytes);
    }
}

FileNumbers CacheCore::files() const {
    FileNumbers numbers{.lock = lock_.name(), .index = index_.read_only_file(), .segments = {}};
    for (const Segment& segment : segments_) {
        numbers.segments.push_back(segment.file());
    }
    return numbers;
}

Result<FileDescriptor> CacheCore::open_index(SessionId session) {
    auto file = index_.open_signed(session_place(session));
    if (file.ok() && !sessions_.note_signs(session)) {
        return Status(Code::invalid, "no session " + std::to_string(session) + " is known");
    }
    return file;
}

void CacheCore::note_user(std::uint32_t uid) {
    const std::lock_guard lock(noting_);
    IndexHeader& header = *view_.header;
    const std::uint32_t count = header.user_count.load();
    const auto known = std::span(header.users).first(std::min(count, kUserLimit));
    if (std::ranges::find(known, uid, [](const auto& user) { return user.load(); }) != known.end()) {
        return;
    }
    if (count < kUserLimit) {
        header.users[count].store(uid);
    }
    header.user_count.store(std::min(count, kUserLimit) + 1);
}

Result<std::uint32_t> CacheCore::open_namespace(const Fingerprint& fingerprint, const Geometry& geometry) {
    return namespaces_.open(fingerprint, geometry);
}

std::vector<std::uint32_t> CacheCore::forget_namespaces(std::span<const std::uint32_t> kept) {
    std::vector<std::uint32_t> sorted(kept.begin(), kept.end());
    std::ranges::sort(sorted);
    // Whoever adds an entry uses its namespace.
    return namespaces_.forget(
        [&](std::uint32_t number) { return !std::ranges::binary_search(sorted, number) && !has_entries(number); });
}

bool CacheCore::has_entries(std::uint32_t name_space) const {
    return store_.counts().used_by[place_of_namespace(name_space)].load(std::memory_order_relaxed) != 0;
}

Result<TenantNumber> CacheCore::open_tenant(const std::string& name, std::uint64_t quota_bytes) {
    if (auto known = store_.tenants().set_quota(name, quota_bytes)) {
        return std::move(*known);
    }
    const std::lock_guard lock(writer_);
    return store_.tenants().open(name, quota_bytes);
}

Status CacheCore::lookup(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found) const {
    return find_readable(view_, space, hashes, found);
}

std::span<std::byte> CacheCore::bytes_at(std::uint64_t address, std::uint64_t size) {
    const std::uint64_t segment = address / view_.header->segment_bytes;
    const std::uint64_t offset = address % view_.header->segment_bytes;
    if (segment >= segments_.size() || size > view_.header->segment_bytes - offset) {
        return {};
    }
    return segments_[segment].writable_bytes().subspan(offset, size);
}

std::uint32_t CacheCore::shards_of(Space space) const {
    const NamespaceUse name_space = use_space(space);
    return name_space ? name_space->geometry.groups[group_of(space)].shards : 0;
}

// None: there is no such group.
NamespaceUse CacheCore::use_space(Space space) const {
    NamespaceUse name_space = namespaces_.use(namespace_of(space));
    return name_space && group_of(space) < name_space->groups.size() ? std::move(name_space) : NamespaceUse();
}

}  // namespace kvo

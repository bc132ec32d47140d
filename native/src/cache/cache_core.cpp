#include "cache/cache_core.hpp"

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "cache/index_reader.hpp"

namespace kvo {
namespace {

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

std::function<Status(const Region&, std::uint64_t)> reserve_in(IndexFile& index) {
    return [&index](const Region& region, std::uint64_t count) { return index.ensure(region, count); };
}

}  // namespace

Result<std::unique_ptr<CacheCore>> CacheCore::create(const CacheOptions& options, PopulateProgress& progress) {
    if (Status status = check_options(options); !status.ok()) {
        return status;
    }
    auto memory = CacheMemory::create(options);
    if (!memory.ok()) {
        return memory.fault();
    }
    auto core = assemble(std::move(memory.value()), options);
    if (!core.ok()) {
        return core;
    }
    if (Status status = core.value()->store_.start(); !status.ok()) {
        return status;
    }
    if (!options.is_sparse) {
        if (Status status = core.value()->growth_.take_first(progress); !status.ok()) {
            return status;
        }
    }
    return core;
}

Result<std::unique_ptr<CacheCore>> CacheCore::adopt(CacheFiles files, const CacheOptions& options) {
    if (Status status = check_policy(options); !status.ok()) {
        return status;
    }
    auto memory = CacheMemory::adopt(std::move(files), options);
    if (!memory.ok()) {
        return memory.fault();
    }
    auto core = assemble(std::move(memory.value()), options);
    if (!core.ok()) {
        return core;
    }
    if (Status status = core.value()->take_over(); !status.ok()) {
        return status;
    }
    return core;
}

Result<std::unique_ptr<CacheCore>> CacheCore::assemble(std::unique_ptr<CacheMemory> memory,
                                                       const CacheOptions& options) {
    const IndexView& view = memory->index().view();
    const IndexHeader& header = *view.header;
    auto arena = Arena::create({.segment_bytes = header.segment_bytes, .extent_bytes = header.extent_bytes});
    if (!arena.ok()) {
        return arena.fault();
    }
    // A successor's policies, too, are those of a pool that has grown fully.
    const std::uint64_t capacity = memory->capacity_bytes();
    if (Status status = arena.value().reserve(capacity / header.extent_bytes); !status.ok()) {
        return status;
    }
    const auto ready_extents = static_cast<std::uint32_t>(header.ready_bytes.load() / header.extent_bytes);
    if (Status status = arena.value().add_extents(ready_extents); !status.ok()) {
        return status;
    }
    auto tenants = TenantTable::create(
        view.tenants, options.policy, {.entry_limit = header.entry_limit, .capacity_bytes = capacity}, options.tenants);
    if (Status status = memory->note_boot(options.owner.boot_id); !status.ok()) {
        return status;
    }
    return std::unique_ptr<CacheCore>(
        new CacheCore(std::move(memory), options, std::move(tenants), std::move(arena.value())));
}

CacheCore::CacheCore(std::unique_ptr<CacheMemory> memory, const CacheOptions& options, TenantTable tenants, Arena arena)
    : memory_(std::move(memory)),
      view_(memory_->index().view()),
      options_(options),
      namespaces_(view_, reserve_in(memory_->index())),
      sessions_(view_, reserve_in(memory_->index()),
                [this](std::uint16_t place) { return memory_->index().has_sign(place); }),
      leases_(view_, reserve_in(memory_->index())),
      store_(memory_->index(), memory_->segments(), namespaces_, std::move(tenants), std::move(arena)),
      growth_(*memory_, writer_, store_, options) {}

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

Result<FileDescriptor> CacheCore::open_index(SessionId session) {
    auto file = memory_->index().open_signed(session_place(session));
    if (file.ok() && !sessions_.note_signs(session)) {
        return Status(Code::invalid, "no session " + std::to_string(session) + " is known");
    }
    return file;
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

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.hpp"
#include "bindings/cache_handle.hpp"
#include "cache/cache_core.hpp"
#include "replay/make_policy.hpp"
#include "shim/file_descriptor.hpp"
#include "shim/file_lock.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

using GroupTuple = std::tuple<std::uint64_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;

using TenantTuple = std::tuple<std::string, std::uint64_t>;  // name, quota
using OwnerTuple = std::tuple<std::string, std::uint64_t, std::optional<std::vector<std::uint32_t>>>;

template <typename Number>
std::span<const Number> numbers_of(const BufferView& buffer, const char* name) {
    const auto bytes = buffer.bytes();
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(Number) == 0;
    if (bytes.size() % sizeof(Number) != 0 || !is_aligned) {
        throw nb::value_error(
            (std::string(name) + " must be an array of numbers of " + std::to_string(sizeof(Number)) + " bytes")
                .c_str());
    }
    return {reinterpret_cast<const Number*>(bytes.data()), bytes.size() / sizeof(Number)};
}

Geometry geometry_of(std::uint32_t hash_block_size, const std::vector<GroupTuple>& groups) {
    Geometry geometry{.hash_block_size = hash_block_size, .groups = {}};
    for (const auto& [record_bytes, block_size, window, shards, rule] : groups) {
        geometry.groups.push_back({.record_bytes = record_bytes,
                                   .block_size = block_size,
                                   .window = window,
                                   .shards = shards,
                                   .rule = static_cast<BoundaryRule>(std::min(rule, 255u))});
    }
    return geometry;
}

CacheOptions make_options(const std::string& policy, bool verifies_always, unsigned threads,
                          std::uint64_t keep_free_bytes, std::uint64_t step_bytes, const OwnerTuple& owner) {
    CacheOptions options;
    options.owner = {.domain = std::get<0>(owner), .boot_id = std::get<1>(owner), .users = std::get<2>(owner)};
    options.policy = take(find_policy(policy));
    options.verify = verifies_always ? Verify::always : Verify::adopted;
    options.populate.threads = threads;
    options.populate.keep_free_bytes = keep_free_bytes;
    options.step_bytes = step_bytes;
    return options;
}

std::unique_ptr<Cache> create_cache(std::uint64_t pool_bytes, std::uint64_t segment_bytes, std::uint64_t extent_bytes,
                                    std::uint32_t entry_limit, const std::string& policy, bool verifies_always,
                                    std::uint32_t huge_pages, unsigned threads, std::uint64_t keep_free_bytes,
                                    std::uint64_t step_bytes, bool is_sparse, const OwnerTuple& owner) {
    CacheOptions options = make_options(policy, verifies_always, threads, keep_free_bytes, step_bytes, owner);
    options.pool_bytes = pool_bytes;
    options.segment_bytes = segment_bytes;
    options.extent_bytes = extent_bytes;
    options.entry_limit = entry_limit;
    options.huge_pages = static_cast<HugePages>(std::min(huge_pages, 3u));
    options.is_sparse = is_sparse;
    auto core = [&] {
        const WithoutGil unlocked;
        PopulateProgress progress;
        return CacheCore::create(options, progress);
    }();
    return std::make_unique<Cache>(share(take(std::move(core))));
}

std::unique_ptr<Cache> adopt_cache(int lock, int index, const std::vector<int>& segments, const std::string& policy,
                                   bool verifies_always, unsigned threads, std::uint64_t keep_free_bytes,
                                   std::uint64_t step_bytes, const std::optional<std::vector<TenantTuple>>& tenants,
                                   const OwnerTuple& owner, std::uint64_t former_boot_id) {
    CacheFiles files{FileDescriptor(lock), FileDescriptor(index), {}};
    for (const int segment : segments) {
        files.segments.emplace_back(segment);
    }
    CacheOptions options = make_options(policy, verifies_always, threads, keep_free_bytes, step_bytes, owner);
    options.former_boot_id = former_boot_id;
    if (tenants) {
        options.tenants.emplace();
        for (const auto& [name, quota_bytes] : *tenants) {
            options.tenants->push_back({.name = name, .quota_bytes = quota_bytes});
        }
    }
    auto core = [&] {
        const WithoutGil unlocked;
        return CacheCore::adopt(std::move(files), options);
    }();
    return std::make_unique<Cache>(share(take(std::move(core))));
}

nb::tuple describe(const Acquired& acquired) {
    nb::list groups;
    for (const LeasedGroup& group : acquired.groups) {
        groups.append(nb::make_tuple(group.first, to_bytes(group.addresses), to_bytes(group.digests)));
    }
    return nb::make_tuple(static_cast<int>(acquired.outcome), acquired.boundary, acquired.lease, nb::tuple(groups));
}

nb::bytes lookup(const Cache& cache, std::uint32_t name_space, std::uint32_t group, nb::handle hashes) {
    const Space space = space_to_look_in(cache, name_space, group);
    const BufferView view(hashes);
    std::vector<std::uint8_t> found(hashes_of(view).size() / kHashBytes);
    raise_if_not_ok(
        without_gil(cache, [&](CacheCore& core) { return core.search().lookup(space, view.bytes(), found); }));
    return to_bytes(found);
}

nb::tuple acquire(const Cache& cache, SessionId session, std::uint32_t name_space, nb::handle chain,
                  std::uint64_t local, std::uint64_t limit, std::uint64_t alignment,
                  const std::vector<std::uint32_t>& shards) {
    check_shards(shards, most_shards(cache, name_space));
    const BufferView view(chain);
    const BoundaryQuery query{name_space, view.bytes(), local, limit, alignment};
    return describe(
        take(without_gil(cache, [&](CacheCore& core) { return core.leases().acquire(session, query, shards); })));
}

nb::tuple acquire_entries(const Cache& cache, SessionId session, std::uint32_t name_space, std::uint32_t group,
                          nb::handle hashes, const std::vector<std::uint32_t>& shards, std::uint8_t lease_for) {
    const Space space = open_space(cache, name_space, group);
    check_shards(shards, cache.core()->namespaces().shards_of(space));
    const BufferView view(hashes);
    const auto keys = hashes_of(view);
    if (lease_for > static_cast<std::uint8_t>(LeaseFor::keep)) {
        throw nb::value_error("a lease is for use, upkeep or keeping");
    }
    const auto purpose = static_cast<LeaseFor>(lease_for);
    return describe(take(without_gil(
        cache, [&](CacheCore& core) { return core.leases().acquire_entries(session, space, keys, shards, purpose); })));
}

nb::bytes find_used(const Cache& cache, std::uint32_t name_space, std::uint32_t group, nb::handle hashes,
                    std::optional<std::uint32_t> since) {
    const Space space = open_space(cache, name_space, group);
    const BufferView view(hashes);
    std::vector<std::uint8_t> found(hashes_of(view).size() / kHashBytes);
    raise_if_not_ok(without_gil(
        cache, [&](CacheCore& core) { return core.search().find_used(space, view.bytes(), found, since); }));
    return to_bytes(found);
}

// For each block what it is worth, as a number of 64 bits with a point.
nb::bytes find_values(const Cache& cache, std::uint32_t name_space, std::uint32_t group, nb::handle hashes) {
    const Space space = open_space(cache, name_space, group);
    const BufferView view(hashes);
    std::vector<double> found(hashes_of(view).size() / kHashBytes);
    raise_if_not_ok(
        without_gil(cache, [&](CacheCore& core) { return core.search().find_values(space, view.bytes(), found); }));
    return to_bytes(found);
}

// For each block why it left, how many seconds ago, and how much more memory would have kept it; or None.
nb::list find_departed(const Cache& cache, std::uint32_t name_space, std::uint32_t group, nb::handle hashes) {
    const Space space = open_space(cache, name_space, group);
    const BufferView view(hashes);
    std::vector<std::optional<Departed>> found(hashes_of(view).size() / kHashBytes);
    raise_if_not_ok(
        without_gil(cache, [&](CacheCore& core) { return core.search().find_departed(space, view.bytes(), found); }));
    nb::list told;
    for (const std::optional<Departed>& one : found) {
        told.append(one ? nb::object(nb::make_tuple(static_cast<int>(one->why), one->seconds_ago, one->missing_bytes))
                        : nb::object(nb::none()));
    }
    return told;
}

// For each block how many seconds it has been readable, or None.
nb::list find_stored(const Cache& cache, std::uint32_t name_space, std::uint32_t group, nb::handle hashes) {
    const Space space = open_space(cache, name_space, group);
    const BufferView view(hashes);
    std::vector<std::optional<std::uint32_t>> found(hashes_of(view).size() / kHashBytes);
    raise_if_not_ok(
        without_gil(cache, [&](CacheCore& core) { return core.search().find_stored(space, view.bytes(), found); }));
    nb::list told;
    for (const std::optional<std::uint32_t>& seconds : found) {
        told.append(seconds ? nb::object(nb::int_(*seconds)) : nb::object(nb::none()));
    }
    return told;
}

// Tickets and addresses; fewer than were asked for where there is no room.
nb::tuple reserve(const Cache& cache, SessionId session, std::uint32_t tenant, std::uint32_t name_space,
                  std::uint32_t group, std::size_t count, nb::handle hashes) {
    if (tenant >= kTenantLimit) {
        throw nb::value_error("no such tenant");
    }
    const Space space = open_space(cache, name_space, group);
    std::optional<BufferView> view;
    std::span<const std::uint8_t> keys;
    if (!hashes.is_none()) {
        keys = hashes_of(view.emplace(hashes));
        count = keys.size() / kHashBytes;
    }
    if (count > kEntryLimitMax) {
        throw nb::value_error(("no cache has " + std::to_string(count) + " entries").c_str());
    }
    std::vector<Ticket> tickets(count);
    std::vector<std::uint64_t> addresses;
    raise_if_not_ok(without_gil(cache, [&](CacheCore& core) {
        const auto decided =
            core.reservations().reserve(session, static_cast<TenantNumber>(tenant), space, keys, tickets);
        if (!decided.ok()) {
            return decided.fault();
        }
        tickets.resize(decided.value());
        addresses.resize(tickets.size());
        return core.reservations().locate(session, tickets, addresses);
    }));
    return nb::make_tuple(to_bytes(tickets), to_bytes(addresses));
}

nb::bytes commit(const Cache& cache, SessionId session, std::uint32_t name_space, std::uint32_t group,
                 std::uint32_t shard, nb::handle tickets, nb::handle hashes, nb::handle parents, nb::handle digests,
                 std::optional<TenantNumber> tenant) {
    const BufferView ticket_view(tickets);
    const BufferView hash_view(hashes);
    std::optional<BufferView> parent_view;
    std::optional<BufferView> digest_view;
    CommitBatch batch{.space = open_space(cache, name_space, group),
                      .shard = shard,
                      .tickets = numbers_of<Ticket>(ticket_view, "tickets"),
                      .hashes = hash_view.bytes(),
                      .parents = {},
                      .digests = {},
                      .tenant = tenant};
    if (!parents.is_none()) {
        batch.parents = parent_view.emplace(parents).bytes();
    }
    if (!digests.is_none()) {
        batch.digests = numbers_of<std::uint64_t>(digest_view.emplace(digests), "digests");
    }
    std::vector<CommitOutcome> outcomes(batch.tickets.size());
    raise_if_not_ok(
        without_gil(cache, [&](CacheCore& core) { return core.commits().commit(session, batch, outcomes); }));
    return to_bytes(outcomes);
}

std::size_t abort_tickets(const Cache& cache, SessionId session, nb::handle tickets) {
    const BufferView view(tickets);
    const auto numbers = numbers_of<Ticket>(view, "tickets");
    return without_gil(cache, [&](CacheCore& core) { return core.reservations().abort(session, numbers); });
}

std::size_t invalidate(const Cache& cache, std::uint32_t name_space, std::uint32_t group, nb::handle hashes) {
    const Space space = space_to_look_in(cache, name_space, group);
    const BufferView view(hashes);
    const auto keys = hashes_of(view);
    return without_gil(cache, [&](CacheCore& core) { return core.removals().invalidate(space, keys); });
}

// Part of the segments, for as long as the array lives.
nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>> view_bytes(const Cache& cache, std::uint64_t address,
                                                             std::uint64_t size) {
    const std::shared_ptr<CacheCore> core = cache.core();
    const std::span<std::byte> bytes = core->memory().bytes_at(address, size);
    if (bytes.size() != size) {
        throw nb::value_error("no slot lies there");
    }
    const nb::capsule owner(new std::shared_ptr<CacheCore>(core),
                            [](void* held) noexcept { delete static_cast<std::shared_ptr<CacheCore>*>(held); });
    return {reinterpret_cast<std::uint8_t*>(bytes.data()), {size}, owner};
}

nb::dict stats(const Cache& cache) {
    const CacheStats stats = without_gil(cache, [](CacheCore& core) { return core.stats(); });
    nb::dict found;
    found["capacity_bytes"] = stats.capacity_bytes;
    found["ready_bytes"] = stats.ready_bytes;
    found["used_bytes"] = stats.used_bytes;
    found["readable"] = stats.readable;
    found["reserved"] = stats.reserved;
    found["quarantined"] = stats.quarantined;
    found["leases"] = stats.leases;
    found["sessions"] = stats.sessions;
    found["namespaces"] = stats.namespaces;
    found["hits"] = stats.hits;
    found["misses"] = stats.misses;
    found["refused"] = stats.refused;
    found["duplicates"] = stats.duplicates;
    found["evicted"] = stats.evicted;
    found["evicted_unused"] = stats.evicted_unused;
    found["residence"] = nb::make_tuple(std::vector<std::uint32_t>(kResidenceBounds.begin(), kResidenceBounds.end()),
                                        stats.residence, stats.residence_seconds);
    found["mismatches"] = stats.mismatches;
    found["moved_bytes"] = stats.moved_bytes;
    found["lost_touches"] = stats.lost_touches;
    found["index_bytes"] = stats.index_bytes;
    nb::list tenants;
    for (const TenantTable::Usage& tenant : stats.tenants) {
        tenants.append(nb::make_tuple(tenant.name, tenant.quota_bytes, tenant.used_bytes));
    }
    found["tenants"] = nb::tuple(tenants);
    return found;
}

nb::dict used_by_each(const Cache& cache) {
    nb::dict found;
    for (const auto& [name_space, bytes] : cache.core()->used_by_each()) {
        found[nb::int_(name_space)] = bytes;
    }
    return found;
}

// In how many blocks one is followed, blocks and bytes that were asked for, and for each size its quarters of the
// pool's and what would have been hits.
nb::tuple memory_curve(const Cache& cache) {
    const MemoryCurve::Counts counts = without_gil(cache, [](CacheCore& core) { return core.memory_curve(); });
    nb::list sizes;
    for (std::size_t at = 0; at < counts.hits.size(); ++at) {
        sizes.append(nb::make_tuple(MemoryCurve::kQuarters[at], counts.hits[at].blocks, counts.hits[at].bytes));
    }
    return nb::make_tuple(counts.one_in, counts.asked.blocks, counts.asked.bytes, nb::tuple(sizes));
}

Status add_member(CacheCore& core, SessionId session, Result<ProcessHandle> process) {
    return process.ok() ? core.sessions().add_member(session, std::move(process.value())) : process.fault();
}

void add_process(const Cache& cache, SessionId session, int pid) {
    raise_if_not_ok(without_gil(cache, [&](CacheCore& core) {
        const auto identity = identify_process(pid);
        return identity.ok() ? add_member(core, session, ProcessHandle::open(identity.value())) : identity.fault();
    }));
}

void add_pidfd(const Cache& cache, SessionId session, int pidfd) {
    FileDescriptor file(pidfd);
    raise_if_not_ok(without_gil(
        cache, [&](CacheCore& core) { return add_member(core, session, ProcessHandle::adopt(std::move(file))); }));
}

template <auto method>
auto call_sessions(const Cache& cache, SessionId session) {
    return without_gil(cache, [&](CacheCore& core) { return (core.sessions().*method)(session); });
}

void bind_sessions(nb::class_<Cache>& cache) {
    cache
        .def("open_session",
             [](const Cache& self, std::uint64_t limit, std::optional<OwnerNumber> owner) {
                 return take(without_gil(
                     self, [&](CacheCore& core) { return core.sessions().open(limit, owner.value_or(kNoOwner)); }));
             })
        .def("add_process", add_process)
        .def("add_pidfd", add_pidfd)
        .def("quarantine", call_sessions<&SessionTable::quarantine>)
        .def("reopen",
             [](const Cache& self, SessionId session, std::optional<OwnerNumber> owner) {
                 return without_gil(
                     self, [&](CacheCore& core) { return core.sessions().reopen(session, owner.value_or(kNoOwner)); });
             })
        .def("is_open", call_sessions<&SessionTable::is_open>)
        .def("held_bytes", call_sessions<&SessionTable::held_bytes>)
        .def("reclaim_ended",
             [](const Cache& self) { return without_gil(self, [](CacheCore& core) { return core.reclaim_ended(); }); });
}

void bind_files(nb::class_<Cache>& cache) {
    cache
        .def("grow",
             [](const Cache& self, PopulateProgress& progress, std::uint64_t keep_free_bytes) {
                 return take(
                     without_gil(self, [&](CacheCore& core) { return core.growth().grow(progress, keep_free_bytes); }));
             })
        .def("shrink",
             [](const Cache& self, std::uint64_t target_bytes) {
                 const Shrunk shrunk =
                     take(without_gil(self, [&](CacheCore& core) { return core.growth().shrink(target_bytes); }));
                 return nb::make_tuple(shrunk.freed_bytes, shrunk.pinned_bytes, shrunk.is_done);
             })
        .def("is_leaving",
             [](const Cache& self) { return self.core()->memory().index().view().header->leaving_from.load() != 0; })
        .def("capacity_bytes", [](const Cache& self) { return self.core()->memory().capacity_bytes(); })
        .def("ready_bytes", [](const Cache& self) { return self.core()->memory().ready_bytes(); })
        .def("files",
             [](const Cache& self) {
                 const FileNumbers files = without_gil(self, [](CacheCore& core) { return core.memory().files(); });
                 return nb::make_tuple(files.lock, files.index, files.segments);
             })
        .def("open_index",
             [](const Cache& self, SessionId session, bool heeds) {
                 return take(without_gil(self, [&](CacheCore& core) { return core.open_index(session, heeds); }))
                     .release();
             })
        .def("note_user",
             [](const Cache& self, std::uint32_t uid) {
                 without_gil(self, [&](CacheCore& core) { core.memory().note_user(uid); });
             })
        .def("adoption",
             [](const Cache& self) {
                 const AdoptionReport& report = self.core()->adoption();
                 return nb::make_tuple(report.readable, report.reserved, report.dropped);
             })
        .def("version", [](const Cache& self) { return self.core()->version(); })
        .def("view", view_bytes, nb::rv_policy::reference)
        .def("stats", stats)
        .def("memory_curve", memory_curve)
        .def("close", &Cache::close);
}

}  // namespace

void bind_cache(nb::module_& module) {
    nb::class_<PopulateProgress>(module, "PopulateProgress")
        .def(nb::init<>())
        .def("cancel", [](PopulateProgress& self) { self.is_cancelled.store(true); });

    nb::class_<Cache> cache(module, "Cache", "The cache core; kvoffload.cache.LocalCache is its face.");
    cache
        .def(
            "open_namespace",
            [](const Cache& self, const nb::bytes& fingerprint, std::uint32_t hash_block_size,
               const std::vector<GroupTuple>& groups) {
                Fingerprint name{};
                if (fingerprint.size() != name.size()) {
                    throw nb::value_error("a fingerprint has 32 bytes");
                }
                std::memcpy(name.data(), fingerprint.data(), name.size());
                const Geometry geometry = geometry_of(hash_block_size, groups);
                return take(without_gil(self, [&](CacheCore& core) { return core.namespaces().open(name, geometry); }));
            })
        .def("forget_namespaces",
             [](const Cache& self, const std::vector<std::uint32_t>& kept) {
                 return without_gil(self, [&](CacheCore& core) { return core.removals().forget_namespaces(kept); });
             })
        .def("open_tenant",
             [](const Cache& self, const std::string& name, std::uint64_t quota_bytes) {
                 return take(without_gil(self, [&](CacheCore& core) { return core.open_tenant(name, quota_bytes); }));
             })
        .def("lookup", lookup)
        .def("acquire", acquire)
        .def("acquire_entries", acquire_entries)
        .def("find_used", find_used, nb::arg("name_space"), nb::arg("group"), nb::arg("hashes"),
             nb::arg("since").none())
        .def("use_clock", [](const Cache& self) { return self.core()->search().use_clock(); })
        .def("used_by", [](const Cache& self, std::uint32_t name_space) { return self.core()->used_by(name_space); })
        .def("used_by_each", used_by_each)
        .def("without_room", [](const Cache& self) { return self.core()->reservations().without_room(); })
        .def("find_departed", find_departed)
        .def("find_stored", find_stored)
        .def("find_values", find_values)
        .def("release",
             [](const Cache& self, SessionId session, LeaseId lease) {
                 return without_gil(self, [&](CacheCore& core) { return core.leases().release(session, lease); });
             })
        .def("reserve", reserve, nb::arg("session"), nb::arg("tenant"), nb::arg("name_space"), nb::arg("group"),
             nb::arg("count"), nb::arg("hashes").none())
        .def("commit", commit, nb::arg("session"), nb::arg("name_space"), nb::arg("group"), nb::arg("shard"),
             nb::arg("tickets"), nb::arg("hashes"), nb::arg("parents").none(), nb::arg("digests").none(),
             nb::arg("tenant").none())
        .def("abort", abort_tickets)
        .def("invalidate", invalidate)
        .def("evict",
             [](const Cache& self, std::uint64_t bytes) {
                 return without_gil(self, [&](CacheCore& core) { return core.removals().evict(bytes); });
             })
        .def("clear", [](const Cache& self, std::uint32_t name_space) {
            most_shards(self, name_space);
            return without_gil(self, [&](CacheCore& core) { return core.removals().clear(name_space); });
        });
    bind_sessions(cache);
    bind_files(cache);
    bind_survey(cache);
    bind_left(module, cache);
    module.def("create_cache", create_cache, nb::arg("pool_bytes"), nb::arg("segment_bytes"), nb::arg("extent_bytes"),
               nb::arg("entry_limit"), nb::arg("policy"), nb::arg("verifies_always"), nb::arg("huge_pages"),
               nb::arg("threads"), nb::arg("keep_free_bytes"), nb::arg("step_bytes"), nb::arg("is_sparse"),
               nb::arg("owner"));
    module.def("adopt_cache", adopt_cache, nb::arg("lock"), nb::arg("index"), nb::arg("segments"), nb::arg("policy"),
               nb::arg("verifies_always"), nb::arg("threads"), nb::arg("keep_free_bytes"), nb::arg("step_bytes"),
               nb::arg("tenants").none(), nb::arg("owner"), nb::arg("former_boot_id"));
    module.def(
        "find_lock_owner", [](int lock) { return take(find_lock_owner(lock)); }, nb::arg("lock"),
        "The process that owns the memory of this lock: 0 if none, -1 in another PID namespace.");
    module.def("is_memory_file", is_memory_file, nb::arg("file"),
               "Whether a received descriptor is of a file in memory. Asks no file system, as that may hang.");
}

}  // namespace kvo

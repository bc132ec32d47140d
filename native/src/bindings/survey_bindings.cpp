#include "bindings/cache_handle.hpp"

#include <map>
#include <vector>

#include "bindings/bindings.hpp"

namespace nb = nanobind;

namespace kvo {
namespace {

constexpr std::uint64_t kUnknown = UINT64_MAX;

// How many there are, and of the first of them: hashes, namespaces, groups, seconds since they were stored, leases,
// tenants, and whether they were used; all but the hashes as numbers of 64 bits.
nb::tuple survey(const Cache& cache, nb::handle prefix, std::size_t limit) {
    const BufferView view(prefix);
    const EntrySurvey found =
        take(without_gil(cache, [&](CacheCore& core) { return core.search().survey(view.bytes(), limit); }));
    std::vector<std::uint64_t> hashes;
    std::vector<std::uint64_t> name_spaces;
    std::vector<std::uint64_t> groups;
    std::vector<std::uint64_t> seconds;
    std::vector<std::uint64_t> leases;
    std::vector<std::uint64_t> tenants;
    std::vector<std::uint64_t> used;
    for (const EntryFacts& entry : found.entries) {
        hashes.insert(hashes.end(), entry.hash.begin(), entry.hash.end());
        name_spaces.push_back(namespace_of(entry.space));
        groups.push_back(group_of(entry.space));
        seconds.push_back(entry.stored_s ? *entry.stored_s : kUnknown);
        leases.push_back(entry.leases);
        tenants.push_back(entry.tenant);
        used.push_back(entry.was_used ? 1 : 0);
    }
    return nb::make_tuple(found.matches, to_bytes(hashes), to_bytes(name_spaces), to_bytes(groups), to_bytes(seconds),
                          to_bytes(leases), to_bytes(tenants), to_bytes(used));
}

// Where the listing goes on, 0 for its end; groups as numbers of 64 bits, hashes, and the hashes before them.
nb::tuple list_blocks(const Cache& cache, std::uint32_t name_space, EntryNumber first, std::size_t limit) {
    space_of(name_space, 0);
    const EntryListing found =
        without_gil(cache, [&](CacheCore& core) { return core.search().list(name_space, first, limit); });
    return nb::make_tuple(found.next, to_bytes(found.groups), to_bytes(found.hashes), to_bytes(found.parents));
}

// Returns the hashes of each namespace's groups, as one string of bytes each; how many blocks were lost; and
// whether that is all.
nb::tuple take_removed(const Cache& cache, std::size_t count) {
    const RemovedLog::Taken taken = without_gil(cache, [&](CacheCore& core) { return core.removed().take(count); });
    std::map<Space, std::vector<HashWords>> by_space;
    for (const RemovedBlock& block : taken.blocks) {
        by_space[block.space].push_back(block.hash);
    }
    nb::list parts;
    for (const auto& [space, hashes] : by_space) {
        parts.append(nb::make_tuple(namespace_of(space), group_of(space), to_bytes(hashes)));
    }
    return nb::make_tuple(parts, taken.lost, taken.is_all);
}

}  // namespace

void bind_survey(nb::class_<Cache>& cache) {
    cache.def("survey", survey)
        .def("list_blocks", list_blocks)
        .def("watch_removed",
             [](const Cache& self, bool is_wanted) {
                 without_gil(self, [&](CacheCore& core) { core.removed().watch(is_wanted); });
             })
        .def("take_removed", take_removed);
}

}  // namespace kvo

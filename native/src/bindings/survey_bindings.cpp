#include "bindings/survey_bindings.hpp"

#include <vector>

#include "bindings/buffer_view.hpp"
#include "bindings/cache_values.hpp"

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

}  // namespace

void bind_survey(nb::class_<Cache>& cache) { cache.def("survey", survey); }

}  // namespace kvo

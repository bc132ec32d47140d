// Adoption: a cache takes over identities, sessions, leases, entries and tenants from the process that had its files
// before.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/cache_memory.hpp"
#include "cache/cache_state.hpp"
#include "cache/reservations.hpp"

namespace kvo {

// Runs once, before any other thread uses the cache. The files may be damaged, so nothing in them is trusted.
class Adoption {
public:
    // Both outlive it.
    Adoption(CacheState& state, Reservations& reservations) : state_(state), reservations_(reservations) {}

    // `tenants` are the tenants from now on.
    Result<AdoptionReport> run(std::span<const TenantTerms> tenants);

private:
    std::vector<std::uint32_t> adopt_lease_lists();
    void adopt_leases(SessionId session);

    CacheState& state_;
    Reservations& reservations_;
};

}  // namespace kvo

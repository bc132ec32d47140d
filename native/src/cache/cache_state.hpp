// The state that all parts of a cache work on: the tables in its index, and the lock for adding and removing entries.
#pragma once

#include <cstddef>

#include "cache/cache_memory.hpp"
#include "cache/entry_store.hpp"
#include "cache/lease_table.hpp"
#include "cache/namespace_table.hpp"
#include "cache/session_table.hpp"
#include "cache/touch_buffer.hpp"
#include "cache/writer_lock.hpp"

namespace kvo {

// Owned by CacheCore. Any thread may use all of it but the store. A caller of the store holds the writer's lock, except
// for the store's counts and for functions whose comment says that a lease or a reservation is enough.
struct CacheState {
    static constexpr std::size_t kPart = 128;           // items done under one hold of the writer's lock
    static constexpr EntryNumber kScanPart = 1u << 12;  // entries looked at under one

    CacheState(CacheMemory& memory, TenantTable tenants, Arena arena);

    // Passes the acquired entries on to the policies. The caller holds the writer's lock.
    void drain_touches();
    // The namespace of a space, for as long as the use lives; none: there is no such group.
    NamespaceUse use_space(Space space) const;

    const IndexView& view;
    NamespaceTable namespaces;
    SessionTable sessions;
    LeaseTable lease_lists;
    TouchBuffer touches;
    mutable WriterLock writer;
    EntryStore store;
};

}  // namespace kvo

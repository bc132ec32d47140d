#include "cache/cache_state.hpp"

#include <functional>
#include <utility>

namespace kvo {
namespace {

std::function<Status(const Region&, std::uint64_t)> reserve_in(IndexFile& index) {
    return [&index](const Region& region, std::uint64_t count) { return index.ensure(region, count); };
}

}  // namespace

CacheState::CacheState(CacheMemory& memory, TenantTable tenants, Arena arena)
    : view(memory.index().view()),
      namespaces(view, reserve_in(memory.index())),
      sessions(
          view, reserve_in(memory.index()),
          [&index = memory.index()](std::uint16_t place) { return index.has_sign(place); },
          [this] { return store.count_room(); }),
      lease_lists(view, reserve_in(memory.index())),
      store(memory.index(), memory.segments(), namespaces, std::move(tenants), std::move(arena)) {}

void CacheState::drain_touches() {
    touches.drain([this](std::span<const EntryNumber> entries) { store.touch(entries); }, TouchBuffer::kAtOnce);
}

NamespaceUse CacheState::use_space(Space space) const {
    NamespaceUse name_space = namespaces.use(namespace_of(space));
    return name_space && group_of(space) < name_space->groups.size() ? std::move(name_space) : NamespaceUse();
}

}  // namespace kvo

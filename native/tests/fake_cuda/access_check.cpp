#include "fake_cuda/access_check.hpp"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace kvo::fake {
namespace {

const char* verb(AccessKind kind) {
    switch (kind) {
        case AccessKind::read:
            return "reads";
        case AccessKind::write:
            return "writes";
        case AccessKind::release:
            break;
    }
    return "gives back";
}

AccessRange range_at(const std::uint8_t* place, std::uint64_t length) {
    const auto begin = reinterpret_cast<std::uint64_t>(place);
    return {begin, begin + length};
}

}  // namespace

std::vector<std::uint8_t*> AccessCheck::admit(const Operation& operation, const std::vector<Use>& uses) {
    const bool is_kernel = !std::holds_alternative<Transfer>(operation.work);
    std::vector<std::uint8_t*> places;
    places.reserve(uses.size());
    for (const Use& use : uses) {
        const Result<Place> place = memory_.locate(use.address, use.length, is_kernel);
        if (!place.ok()) {
            report(*operation.accessor.name + " " + verb(use.kind) + " " + place.fault().message());
            return {};
        }
        places.push_back(place.value().at);
    }
    const bool is_in_place = std::holds_alternative<Compute>(operation.work);
    if (!is_in_place && !check_parts(operation, uses, places)) {
        return {};
    }
    const auto* const transfer = std::get_if<Transfer>(&operation.work);
    const bool reads_in_order = transfer == nullptr || transfer->reads_in_stream_order;
    for (std::size_t i = 0; i < uses.size(); ++i) {
        const bool is_early = uses[i].kind == AccessKind::read && !reads_in_order;
        if (!check_range(range_at(places[i], uses[i].length), uses[i].kind, operation.accessor,
                         is_early ? operation.known_to_its_host : operation.known)) {
            return {};
        }
    }
    return places;
}

Region& AccessCheck::allocate(MemoryKind kind, std::uint64_t bytes) {
    Region& region = memory_.allocate(kind, bytes);
    history_.forget(region.range());  // of whoever had these bytes before
    return region;
}

// Parts of one operation have no order among themselves.
bool AccessCheck::check_parts(const Operation& operation, const std::vector<Use>& uses,
                              const std::vector<std::uint8_t*>& places) {
    std::vector<std::size_t> order(uses.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::ranges::sort(order, {}, [&](std::size_t i) { return places[i]; });
    std::uint64_t read_end = 0;
    std::uint64_t write_end = 0;
    for (const std::size_t i : order) {
        const AccessRange range = range_at(places[i], uses[i].length);
        const bool writes = uses[i].kind == AccessKind::write;
        if (range.begin < write_end || (writes && range.begin < read_end)) {
            report(*operation.accessor.name + " " + verb(uses[i].kind) + " " + name_range(range) +
                   ", which overlaps another part of the same operation");
            return false;
        }
        std::uint64_t& end = writes ? write_end : read_end;
        end = std::max(end, range.end);
    }
    return true;
}

bool AccessCheck::check_range(AccessRange range, AccessKind kind, const Accessor& accessor, const VectorClock& known) {
    const auto race = history_.record(range, kind, accessor, known);
    if (race) {
        report("race: " + *accessor.name + " " + verb(kind) + " " + name_range(range) + "; " + *race->earlier.name +
               " " + verb(race->earlier_kind) + " " + name_range(race->where) +
               " of it, and there is no order between them");
    }
    return !race;
}

std::string AccessCheck::name_range(AccessRange range) const {
    const Region* const region = memory_.lookup_content(range.begin);
    return region == nullptr ? "host memory at " + hex(range.begin) : describe(*region, range);
}

void AccessCheck::report(const std::string& text) {
    if (keeps_reports_) {
        reports_.push_back(text);
        return;
    }
    std::fprintf(stderr, "fake_cuda: %s\n", text.c_str());
    std::abort();
}

void AccessCheck::reset(bool packs_memory) {
    memory_ = MemoryTable(packs_memory);
    history_ = AccessHistory{};
    reports_.clear();
}

}  // namespace kvo::fake

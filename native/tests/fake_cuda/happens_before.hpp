// Which accesses have an order between them: vector clocks, and the last accesses to every byte.
//
// An actor is a stream or a host thread. Accesses are recorded in an order in which they may have happened; one that an
// earlier one does not happen before races with it. (FastTrack, Flanagan and Freund, PLDI 2009: the last write and the
// reads since are enough to find the first race on every byte.)
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace kvo::fake {

using Actor = std::size_t;

class VectorClock {
public:
    std::uint64_t at(Actor actor) const { return actor < counts_.size() ? counts_[actor] : 0; }
    std::uint64_t tick(Actor actor);
    void join(const VectorClock& other);

private:
    std::vector<std::uint64_t> counts_;
};

// The actor that accesses memory, and how far its own clock is.
struct Accessor {
    Actor actor = 0;
    std::uint64_t count = 0;  // the actor's own clock at the access
    bool is_host = false;
    std::shared_ptr<const std::string> name;  // for the report
};

enum class AccessKind : std::uint8_t {
    read,
    write,
    release,  // the memory goes: races as a write does, but not with hosts, who order themselves; is not recorded
};

struct AccessRange {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
};

struct Race {
    Accessor earlier;
    AccessKind earlier_kind = AccessKind::read;
    AccessRange where;
};

class AccessHistory {
public:
    // The first race that this access is part of, if any; a read or write is recorded all the same.
    std::optional<Race> record(AccessRange range, AccessKind kind, const Accessor& accessor, const VectorClock& known);
    // The memory is gone; what comes to its addresses is new.
    void forget(AccessRange range);
    std::size_t cells() const { return cells_.size(); }

private:
    struct Cell {
        std::uint64_t end = 0;
        std::optional<Accessor> write;
        std::vector<Accessor> reads;  // since the write
    };
    using Cells = std::map<std::uint64_t, Cell>;  // by their begin; disjoint

    void split_at(std::uint64_t address);
    void fill_gaps(AccessRange range);

    Cells cells_;
};

}  // namespace kvo::fake

#include "cache/index_reader.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "index/lookup.hpp"

namespace kvo {

Result<std::unique_ptr<IndexReader>> IndexReader::open(FileDescriptor file) {
    struct stat facts;
    if (fstat(file.number(), &facts) != 0 || facts.st_size <= 0) {
        return Status(Code::invalid, "the descriptor is of no index file");
    }
    // A forked child may go on reading: it changes nothing, and believes nothing that it has not compared.
    auto segment = Segment::adopt(std::move(file), {.size_bytes = static_cast<std::uint64_t>(facts.st_size),
                                                    .access = Access::read_only,
                                                    .huge_pages = HugePages::none,
                                                    .fork_rule = ForkRule::keep});
    if (!segment.ok()) {
        return segment.fault();
    }
    // Only atomics are loaded through the view, so nothing writes to the read-only pages.
    const std::span<const std::byte> bytes = segment.value().bytes();
    const auto view = view_index({const_cast<std::byte*>(bytes.data()), bytes.size()});
    if (!view.ok()) {
        return view.fault();
    }
    return std::unique_ptr<IndexReader>(new IndexReader(std::move(segment.value()), view.value()));
}

IndexReader::IndexReader(Segment segment, const IndexView& view)
    : segment_(std::move(segment)),
      view_(view),
      namespaces_(view_, [](const Region&, std::uint64_t) { return Status(Code::invalid, "a reader adds nothing"); }) {}

Status IndexReader::lookup(Space space, std::span<const std::uint8_t> hashes, std::span<std::uint8_t> found) const {
    return find_readable(view_, space, hashes, found);
}

Result<std::uint64_t> IndexReader::find_boundary(const BoundaryQuery& query) {
    NamespaceUse name_space = namespaces_.use(query.name_space);
    if (!name_space) {
        namespaces_.adopt();
        name_space = namespaces_.use(query.name_space);
    }
    if (!name_space) {
        return Status(Code::invalid, "no namespace has number " + std::to_string(query.name_space));
    }
    if (query.chain.size() % kHashBytes != 0 || query.alignment == 0) {
        return Status(Code::invalid, "a chain has 32 bytes a hash, and an alignment at least 1 token");
    }
    thread_local BoundarySearch search;
    return search.find(view_, name_space->geometry, query);
}

Status find_readable(const IndexView& view, Space space, std::span<const std::uint8_t> hashes,
                     std::span<std::uint8_t> found) {
    if (hashes.size() != found.size() * kHashBytes) {
        return {Code::invalid, "hashes have 32 bytes each"};
    }
    constexpr std::size_t kStep = 256;
    std::array<Found, kStep> finds;
    for (std::size_t begin = 0; begin < found.size(); begin += kStep) {
        const auto part = std::span(finds).first(std::min(kStep, found.size() - begin));
        find_entries(view, space, hashes.subspan(begin * kHashBytes), 1, part);
        for (std::size_t i = 0; i < part.size(); ++i) {
            found[begin + i] = part[i].entry != kNoEntry;
        }
    }
    return {};
}

}  // namespace kvo

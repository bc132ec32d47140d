#include "copy/copy_runs.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace kvo;

namespace {

using Bytes = std::vector<std::uint8_t>;
using Random = std::mt19937_64;

// The arrays that CopyRuns points into.
struct RunList {
    std::vector<std::uint64_t> sources, destinations, lengths;

    void add(const std::uint8_t* source, std::uint8_t* destination, std::uint64_t length) {
        sources.push_back(reinterpret_cast<std::uint64_t>(source));
        destinations.push_back(reinterpret_cast<std::uint64_t>(destination));
        lengths.push_back(length);
    }
    CopyRuns view() const { return {sources.data(), destinations.data(), lengths.data(), sources.size()}; }
};

struct Grid {
    std::uint64_t threads;
    std::uint32_t team_size;
};

Grid random_grid(Random& random) {
    const auto team_size = static_cast<std::uint32_t>(1u << random() % 9);
    return {team_size * (1 + random() % 5), team_size};
}

// Copies as a device does, in an order that no correct kernel may depend on.
void run_shuffled(const RunList& list, const Grid& grid, Random& random) {
    std::vector<std::uint64_t> order(grid.threads);
    for (std::uint64_t i = 0; i < grid.threads; ++i) {
        order[i] = i;
    }
    std::ranges::shuffle(order, random);
    for (const std::uint64_t thread : order) {
        copy_runs(list.view(), {thread, grid.threads, grid.team_size});
    }
}

Bytes random_bytes(std::size_t size, Random& random) {
    Bytes bytes(size);
    std::ranges::generate(bytes, [&] { return static_cast<std::uint8_t>(random()); });
    return bytes;
}

std::uint64_t random_length(Random& random) {
    switch (random() % 4) {
        case 0:
            return random() % 40;  // shorter than a few words
        case 1:
            return 16 * (random() % 300);
        default:
            return random() % 5000;
    }
}

}  // namespace

TEST(any_lengths_and_alignments_equal_memcpy) {
    Random random(21);
    for (int round = 0; round < 150; ++round) {
        const Bytes source = random_bytes(1 << 16, random);
        Bytes destination = random_bytes(1 << 16, random);
        Bytes expected = destination;
        RunList list;
        std::uint64_t at = random() % 40;  // destinations in order, with gaps that must stay as they are
        for (;;) {
            const std::uint64_t length = random_length(random);
            if (at + length > destination.size()) {
                break;
            }
            const std::uint64_t from = random() % (source.size() - length);
            list.add(source.data() + from, destination.data() + at, length);
            std::memcpy(expected.data() + at, source.data() + from, length);
            at += length + random() % 40;
        }
        run_shuffled(list, random_grid(random), random);
        CHECK(destination == expected);
    }
}

TEST(every_pair_of_alignments_at_every_short_length) {
    Random random(22);
    const Bytes source = random_bytes(256, random);
    for (std::size_t from = 0; from < 17; ++from) {
        for (std::size_t to = 0; to < 17; ++to) {
            for (std::uint64_t length = 0; length < 70; ++length) {
                Bytes destination(256, 0xee);
                Bytes expected = destination;
                std::memcpy(expected.data() + to, source.data() + from, length);
                RunList list;
                list.add(source.data() + from, destination.data() + to, length);
                run_shuffled(list, {4, 4}, random);
                CHECK(destination == expected);
            }
        }
    }
}

TEST(pages_gathered_and_scattered_come_back) {
    Random random(23);
    for (const std::uint64_t page_bytes : {512u, 4096u, 4608u, 584u, 1000u}) {
        constexpr std::size_t kPages = 64;
        const Bytes cache = random_bytes(kPages * page_bytes, random);
        std::vector<std::size_t> chosen = {63, 0, 17, 18, 19, 40};
        Bytes staging(chosen.size() * page_bytes);
        Bytes restored(cache.size());
        RunList gather, scatter;
        for (std::size_t i = 0; i < chosen.size(); ++i) {
            gather.add(cache.data() + chosen[i] * page_bytes, staging.data() + i * page_bytes, page_bytes);
            scatter.add(staging.data() + i * page_bytes, restored.data() + chosen[i] * page_bytes, page_bytes);
        }
        run_shuffled(gather, random_grid(random), random);
        run_shuffled(scatter, random_grid(random), random);
        for (std::size_t page = 0; page < kPages; ++page) {
            const bool is_chosen = std::ranges::find(chosen, page) != chosen.end();
            const std::uint8_t* const bytes = restored.data() + page * page_bytes;
            CHECK(is_chosen ? std::memcmp(bytes, cache.data() + page * page_bytes, page_bytes) == 0
                            : std::all_of(bytes, bytes + page_bytes, [](std::uint8_t byte) { return byte == 0; }));
        }
    }
}

// Real threads: ThreadSanitizer reports any byte that two of them write.
TEST(threads_of_a_grid_share_no_destination_byte) {
    Random random(24);
    const Bytes source = random_bytes(1 << 15, random);
    Bytes destination(source.size());
    RunList list;
    std::uint64_t at = 0;
    while (at < source.size()) {
        const std::uint64_t length = std::min<std::uint64_t>(1 + random_length(random), source.size() - at);
        list.add(source.data() + at, destination.data() + at, length);
        at += length;
    }
    {
        std::vector<std::jthread> threads;
        for (std::uint64_t thread = 0; thread < 16; ++thread) {
            threads.emplace_back([&, thread] { copy_runs(list.view(), {thread, 16, 4}); });
        }
    }
    CHECK(destination == source);
}

TEST(a_list_is_fetched_by_all_threads_together) {
    Random random(25);
    for (const std::size_t words : {1u, 3u, 24u, 3000u}) {
        std::vector<std::uint64_t> source(words);
        std::vector<std::uint64_t> destination(words + 1);
        std::ranges::generate(source, random);
        const std::uint64_t from = reinterpret_cast<std::uint64_t>(source.data());
        const std::uint64_t to = reinterpret_cast<std::uint64_t>(destination.data());
        for (std::uint32_t thread = 0; thread < 64; ++thread) {
            fetch(from, to, words * sizeof(std::uint64_t), thread, 64);
        }
        CHECK(std::equal(source.begin(), source.end(), destination.begin()));
        CHECK_EQUAL(destination.back(), 0u);
    }
}

TEST(no_runs_and_empty_runs_touch_nothing) {
    copy_runs({nullptr, nullptr, nullptr, 0}, {0, 32, 32});
    std::uint8_t byte = 7;
    RunList list;
    list.add(&byte, &byte + 1, 0);
    copy_runs(list.view(), {0, 1, 1});
    CHECK_EQUAL(byte, 7);
}

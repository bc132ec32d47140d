#include "index/lookup.hpp"

#include <algorithm>
#include <barrier>
#include <random>
#include <thread>

#include "child_process.hpp"
#include "index_traffic.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// The header's clock is used here to say that the writer has finished.
Verdict read_until_done(const IndexView& view, const KeyKinds& keys, std::size_t first) {
    for (std::size_t pass = first;; ++pass) {
        const bool is_last = view.header->clock.load() != 0;
        if (const Verdict verdict = read_all(view, keys, pass % 2 == 0); verdict != kGood || is_last) {
            return verdict;
        }
    }
}

void read_beside_a_writer(const KeyKinds& keys, std::uint64_t changes) {
    IndexFixture index(static_cast<EntryNumber>(keys.lasting.size() + keys.passing.size() + 1));
    Writer writer(index, keys);
    constexpr std::size_t kReaders = 3;
    std::array<Verdict, kReaders> verdicts{};
    std::barrier<> start(kReaders + 1);
    std::vector<std::thread> readers;
    for (std::size_t i = 0; i < kReaders; ++i) {
        readers.emplace_back([&, i] {
            start.arrive_and_wait();
            verdicts[i] = read_until_done(index.view(), keys, i);
        });
    }
    start.arrive_and_wait();
    for (std::uint64_t step = 0; step < changes; ++step) {
        writer.change(step);
    }
    index.view().header->clock = 1;
    for (std::thread& reader : readers) {
        reader.join();
    }
    for (const Verdict verdict : verdicts) {
        CHECK_EQUAL(static_cast<int>(verdict), static_cast<int>(kGood));
    }
}

// Looks keys up in a process that knows nothing but the descriptor.
int read_in_child(FileDescriptor file, std::uint64_t size, const KeyKinds& keys, const Line& line) {
    const Segment segment = take(Segment::adopt(
        std::move(file), {.size_bytes = size, .access = Access::read_only, .huge_pages = HugePages::none}));
    const std::span<const std::byte> bytes = segment.bytes();
    const IndexView view = take(view_index({const_cast<std::byte*>(bytes.data()), bytes.size()}));
    line.tell();
    return read_until_done(view, keys, 0);
}

void read_in_another_process(const KeyKinds& keys, std::uint64_t changes) {
    IndexFixture index(static_cast<EntryNumber>(keys.lasting.size() + keys.passing.size() + 1));
    Writer writer(index, keys);
    FileDescriptor file = take(index.file().segment().open_read_only());
    ChildProcess child([&](const Line& line) {
        return read_in_child(std::move(file), index.file().segment().size_bytes(), keys, line);
    });
    child.line().await();
    for (std::uint64_t step = 0; step < changes; ++step) {
        writer.change(step);
    }
    index.view().header->clock = 1;
    CHECK_EQUAL(child.wait_exit(), static_cast<int>(kGood));
}

}  // namespace

TEST(batches_find_what_single_look_ups_find) {
    std::mt19937_64 random(5);
    const Space space = make_space(3, 1);
    IndexFixture index(20'000);
    std::vector<Key> keys;
    for (std::uint64_t number = 0; number < 20'000; ++number) {
        keys.push_back(make_key(number, number % 7 == 0 ? make_space(2, 1) : space));
        if (number % 3 != 0) {
            index.add(keys.back());
        }
    }
    for (int round = 0; round < 400; ++round) {
        const std::size_t stride = 1 + random() % 8;
        const std::size_t count = round % 10 == 0 ? random() % 3 : random() % 150;
        std::vector<Key> chain(stride * count + random() % stride);
        std::ranges::generate(chain, [&] { return keys[random() % keys.size()]; });
        // The hashes may lie at any address.
        const std::vector<std::uint8_t> hashes = pack_hashes(chain);
        const std::size_t shift = random() % 64;
        std::vector<std::uint8_t> bytes(shift + hashes.size());
        std::ranges::copy(hashes, bytes.begin() + static_cast<std::ptrdiff_t>(shift));
        std::vector<Found> found(count, Found{7, EntryWord(7)});
        find_entries(index.view(), space, std::span(bytes).subspan(shift), stride, found);
        for (std::size_t i = 0; i < count; ++i) {
            const Found expected = find_entry(index.view(), {chain[(i + 1) * stride - 1].hash, space});
            CHECK_EQUAL(found[i].entry, expected.entry);
            CHECK(found[i].word == expected.word);
        }
    }
}

TEST(every_batch_length_is_served_whole) {
    IndexFixture index(1000);
    std::vector<Key> keys;
    for (std::uint64_t number = 0; number < 200; ++number) {
        keys.push_back(make_key(number));
        index.add(keys.back());
    }
    const std::vector<std::uint8_t> hashes = pack_hashes(keys);
    for (std::size_t count = 0; count <= keys.size(); ++count) {
        std::vector<Found> found(keys.size());
        find_entries(index.view(), keys[0].space, hashes, 1, std::span(found).first(count));
        for (std::size_t i = 0; i < keys.size(); ++i) {
            CHECK_EQUAL(found[i].entry != kNoEntry, i < count);
        }
    }
}

TEST(tags_and_buckets_are_within_their_bounds) {
    std::mt19937_64 random(3);
    for (int round = 0; round < 100'000; ++round) {
        const std::uint64_t mixed = random() << (random() % 64);
        const auto count = static_cast<std::uint32_t>(64 + random() % 5'000);
        const std::uint32_t bucket = bucket_of(mixed, count);
        CHECK(bucket < count);
        CHECK(tag_of(mixed) != 0);
        // One bucket more moves a key only out of the bucket that is split.
        const std::uint32_t next = bucket_of(mixed, count + 1);
        CHECK(next == bucket || (next == count && bucket == count - std::bit_floor(count)));
    }
}

TEST(keys_of_a_new_process_spread_over_all_buckets) {
    constexpr std::uint32_t kBuckets = 1000;
    std::vector<std::uint32_t> counts(1024);
    std::array<std::uint32_t, 256> tags{};
    for (std::uint32_t number = 0; number < 100 * kBuckets; ++number) {
        // As poor as hashes can be: only one word differs, and only in its low bits.
        const Key key{{1, 2, number, 4}, make_space(1, 1)};
        ++counts[mix_key(key, kSeed) & 1023];
        ++tags[tag_of(mix_key(key, kSeed))];
    }
    CHECK(std::ranges::max(counts) < 200);
    CHECK(std::ranges::max(tags) < 2000);
}

TEST(threads_find_what_is_there_beside_a_writer) { read_beside_a_writer(make_scattered(300, 6'000), 60'000); }

TEST(threads_find_what_is_there_in_crowded_chains) { read_beside_a_writer(make_crowded(40, 120, 10), 30'000); }

TEST(threads_find_what_is_there_while_long_chains_are_split) {
    for (int round = 0; round < 5; ++round) {
        read_beside_a_writer(make_crowded(60, 1'500, 3), 6'000);
    }
}

TEST(another_process_finds_what_is_there) {
    read_in_another_process(make_scattered(300, 6'000), 60'000);
    read_in_another_process(make_crowded(40, 120, 10), 30'000);
}

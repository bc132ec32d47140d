#include "disk/record_index.hpp"

#include <map>
#include <utility>

#include "check.hpp"
#include "digest/digest_field.hpp"

using namespace kvo;

namespace {

KeyMark mark(std::uint64_t number) { return {digest_field::mix(number + 1), number}; }

}  // namespace

TEST(marks_differ_where_keys_do) {
    RecordKey key;
    const KeyMark plain = mark_of(key);
    const auto changed = [&](auto change) {
        RecordKey other = key;
        change(other);
        return mark_of(other);
    };
    CHECK(!(changed([](RecordKey& one) { one.fingerprint[0] = 1; }) == plain));
    CHECK(!(changed([](RecordKey& one) { one.block_hash[31] = 1; }) == plain));
    CHECK(!(changed([](RecordKey& one) { one.group = 1; }) == plain));
    CHECK(!(changed([](RecordKey& one) { one.shard = 1; }) == plain));
    CHECK(changed([](RecordKey&) {}) == plain);
}

TEST(it_does_what_a_map_does) {
    RecordIndex index(8);
    std::map<std::uint64_t, std::pair<RecordPlace, bool>> model;
    std::uint64_t state = 5;
    const auto next = [&state](std::uint64_t bound) { return digest_field::mix(state += 3) % bound; };
    for (int step = 0; step < 40000; ++step) {
        const std::uint64_t number = next(4000);
        const auto known = model.find(number);
        switch (next(step < 20000 ? 6 : 8)) {
            case 0:
                CHECK_EQUAL(index.erase(mark(number)), known != model.end());
                model.erase(number);
                break;
            case 1:
                if (known != model.end()) {
                    const RecordPlace elsewhere{known->second.first.segment, known->second.first.offset + 64, 1};
                    CHECK(!index.erase_at(mark(number), elsewhere));
                    index.touch(mark(number), elsewhere);
                    CHECK_EQUAL(index.is_hot(mark(number)), known->second.second);
                    index.touch(mark(number), known->second.first);
                    known->second.second = true;
                }
                break;
            case 7:
                if (next(500) == 0) {
                    const auto segment = static_cast<std::uint32_t>(next(8));
                    const std::uint64_t from = next(2) * 64 * 500;
                    const std::size_t dropped = std::erase_if(model, [&](const auto& one) {
                        return one.second.first.segment == segment && one.second.first.offset >= from;
                    });
                    CHECK_EQUAL(index.drop_segment(segment, from), std::uint64_t{dropped});
                }
                break;
            default: {
                const RecordPlace place{static_cast<std::uint32_t>(next(8)), 64 * next(1000),
                                        static_cast<std::uint32_t>(next(9000))};
                index.put(mark(number), place);
                model[number] = {place, false};
            }
        }
        const auto now = model.find(number);
        CHECK_EQUAL(index.find(mark(number)).has_value(), now != model.end());
    }
    CHECK_EQUAL(index.size(), std::uint64_t{model.size()});
    std::vector<SegmentUse> uses(8);
    std::uint64_t live = 0;
    for (const auto& [number, one] : model) {
        CHECK(index.find(mark(number)) == one.first);
        CHECK_EQUAL(index.is_hot(mark(number)), one.second);
        SegmentUse& use = uses[one.first.segment];
        ++use.records;
        use.live_bytes += record_footprint(one.first.length);
        use.hot_bytes += one.second ? record_footprint(one.first.length) : 0;
        live += record_footprint(one.first.length);
    }
    for (std::uint32_t segment = 0; segment < 8; ++segment) {
        CHECK_EQUAL(index.use(segment).records, uses[segment].records);
        CHECK_EQUAL(index.use(segment).live_bytes, uses[segment].live_bytes);
        CHECK_EQUAL(index.use(segment).hot_bytes, uses[segment].hot_bytes);
    }
    CHECK_EQUAL(index.live_bytes(), live);
    index.clear();
    CHECK_EQUAL(index.size(), std::uint64_t{0});
    CHECK(!index.find(mark(1)));
}

TEST(a_record_takes_about_sixty_bytes_of_memory) {
    RecordIndex index(1);
    for (std::uint64_t number = 0; number < 1 << 16; ++number) {
        index.put(mark(number), {0, 64 * number, 10});
    }
    CHECK(index.memory_bytes() <= (std::uint64_t{1} << 16) * 60);
}

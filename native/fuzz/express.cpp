// The express channel's stream: frames behind their lengths, as a process sends them, cut anywhere, to the service that
// serves them.
#include "express_fixture.hpp"
#include "service/express_stream.hpp"
#include "target.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

// How a stream comes, in the first byte of an input.
constexpr std::uint8_t kCut = 1, kDraining = 2, kUnsent = 4;

CacheOptions tiny_options() {
    CacheOptions options = small_options();
    options.pool_bytes = options.segment_bytes = 1 << 20;
    options.entry_limit = 500;
    return options;
}

struct Scene : ExpressScene {
    Scene() : ExpressScene(small_terms(64 << 10), tiny_options()) { put_all(1, 64); }
};

fuzz::Bytes make_stream(std::uint8_t style, const std::string& frames) {
    return fuzz::Output().number(style).add(bytes_in(frames)).bytes();
}

}  // namespace

std::vector<fuzz::Bytes> fuzz::make_seeds() {
    Scene scene;
    std::vector<Bytes> seeds;
    std::string all;
    std::uint64_t requests = 0, one_way = 0;
    const auto frame_of = [&](std::uint64_t op, const FieldList& fields) {
        return pack(make_frame({.op = op, .number = op >= 32 && op < 48 ? ++one_way : ++requests}, fields));
    };
    for (const auto& [op, fields] : scene.good_calls()) {
        all += frame_of(op, fields);
        seeds.push_back(make_stream(0, pack(make_frame({.op = op, .number = 1}, fields))));
    }
    seeds.push_back(make_stream(kCut, all));
    // Blocks that are granted, written, and leased: tickets and leases are the same in every cache that is made so.
    const Hashes hashes = chain(7, 2);
    const Answer granted = scene.ask(express::kCredits, scene.credits_fields(3, 0, hashes));
    requests = one_way = 0;
    std::string saved = frame_of(express::kCredits, scene.credits_fields(3, 0, hashes));
    saved += frame_of(express::kPublish, scene.publish_fields(3, 0, granted.tickets, hashes, {}, {5, 6}));
    const Answer acquired = scene.ask(express::kAcquireEntries, scene.entries_fields(0, scene.keys(0, 1, 0, 2)));
    saved += frame_of(express::kAcquireEntries, scene.entries_fields(0, scene.keys(0, 1, 0, 2)));
    saved += frame_of(express::kRelease, {numbers({acquired.lease})});
    seeds.push_back(make_stream(0, saved));
    // Calls with arrays of unequal lengths, or that name things that are not there. Each must be refused.
    const std::uint64_t far = UINT16_MAX;
    const Hashes one = chain(7, 1);
    requests = one_way = 0;
    std::string refused = frame_of(express::kCredits, scene.credits_fields(3, 0, hashes));
    for (const FieldList& fields :
         {scene.publish_fields(3, 0, granted.tickets, one), scene.publish_fields(3, 0, granted.tickets, hashes, one),
          scene.publish_fields(3, 0, granted.tickets, hashes, {}, {5}),
          scene.publish_fields(3, 1, granted.tickets, hashes, {}, {5, 6}),
          scene.publish_fields(3, 0, granted.tickets, hashes, {}, {5, 6}, far, far),
          scene.publish_fields(kGroupLimit, 0, granted.tickets, hashes)}) {
        refused += frame_of(express::kPublish, fields);
    }
    refused += frame_of(express::kAcquire, scene.acquire_fields(1, 4, {0, far}));
    refused += frame_of(express::kAcquireEntries, scene.entries_fields(0, scene.keys(0, 1, 0, 2), {0, 2}));
    refused += frame_of(express::kInvalidate, {whole(far), whole(far), blob(hashes)});
    seeds.push_back(make_stream(0, refused));
    seeds.push_back(make_stream(kUnsent, saved));
    seeds.push_back(make_stream(kDraining | kCut, saved));
    return seeds;
}

void fuzz::run(std::span<const std::uint8_t> bytes) {
    Input input(bytes);
    const std::uint8_t style = input.byte();
    Scene scene;
    scene.log.watch(true);
    scene.is_draining = (style & kDraining) != 0;
    ExpressStream stream(scene.terms.frame_bytes);
    std::string out;
    for (bool goes_on = true; goes_on && !input.is_empty();) {
        const std::span<std::uint8_t> room = stream.room();
        CHECK(!room.empty());
        const std::span<const std::uint8_t> part = input.take((style & kCut) != 0 ? 1 : room.size());
        std::ranges::copy(part, room.begin());
        stream.add(part.size());
        goes_on = stream.take_frames([&](std::span<const std::uint8_t> frame) {
            const Bytes alone(frame.begin(), frame.end());  // what lies behind it is another's
            return scene.service->serve(alone, kNow, out);
        });
    }
    read_answers(out);
    scene.service->settle((style & kUnsent) == 0);
    CHECK(scene.cache->sessions().quarantine(scene.session));
    CHECK_EQUAL(scene.cache->reclaim_ended(), 1u);
    scene.check_nothing_held();
    const CacheStats stats = scene.cache->stats();
    CHECK(stats.used_bytes <= stats.capacity_bytes);
}

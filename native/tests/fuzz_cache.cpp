// A fuzz target: any bytes are operations on a cache, see cache_operations.hpp. A fault of the cache ends the process.
#include <cstdio>
#include <cstdlib>
#include <exception>

#include "cache_operations.hpp"
#include "fuzz_cache.hpp"
#include "replay/make_policy.hpp"

using namespace kvo;
using namespace kvo::test;

namespace {

World small_world(ByteSource& bytes) {
    World world;
    world.segment_bytes = 64 << 10;
    world.extent_bytes = 4 << 10;
    world.chains = 6;
    world.blocks = 8;
    world.record_bytes = {200, 500, 5000, 1500, 700};
    const std::uint32_t style = bytes.take();
    world.verifies_always = (style & 1) != 0;
    // Entries run short before memory does in some.
    world.entry_limit = (style & 6) == 0 ? 48 : 1024;
    const auto policies = policy_names();
    const std::string_view policy = policies[bytes.below(static_cast<std::uint32_t>(policies.size()))];
    policy.copy(world.policy, sizeof(world.policy) - 1);
    world.policy[std::min(policy.size(), sizeof(world.policy) - 1)] = 0;
    return world;
}

}  // namespace

void kvo::test::run_cache_operations(std::span<const std::uint8_t> input) {
    constexpr int kOperationLimit = 400;
    ByteSource bytes(input);
    const auto model = std::make_unique<CacheModel>();
    model->world = small_world(bytes);
    PopulateProgress progress;
    auto core = CacheCore::create(model->world.options(), progress);
    CHECK(core.ok());
    CallObserver observer;
    CacheCalls calls(*core.value(), *model, observer);
    calls.open_world();
    CacheOperations operations(calls, getpid());
    operations.open_session(bytes);
    for (int i = 0; i < kOperationLimit && !bytes.is_empty(); ++i) {
        operations.run_one(bytes);
        calls.check_all();
    }
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        kvo::test::run_cache_operations({data, size});
    } catch (const std::exception& fault) {
        std::fprintf(stderr, "%s\n", fault.what());
        std::abort();
    }
    return 0;
}

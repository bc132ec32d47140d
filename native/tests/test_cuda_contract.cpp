// The contract of every copy engine, run on the CUDA engine and the driver made for tests, in each of its ways.
#include <array>
#include <cstring>

#include "check.hpp"
#include "copy/cuda_engine.hpp"
#include "copy_contract.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;

namespace {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kRounds = 8;
#else
constexpr int kRounds = 40;
#endif

// The slots are half in registered memory, which is registered while the first plans run.
class FakeGround final : public test::CopyGround {
public:
    FakeGround(CopyWay way, std::uint64_t seed) : way_(way), program_(FAKE_CUDA, {.seed = seed, .missing = {}}) {}

    std::uint64_t make_pages(std::size_t size_bytes) override {
        page_bytes_ = size_bytes;
        pages_ = program_.allocate_device(size_bytes);
        return pages_;
    }
    std::uint64_t make_slots(std::size_t size_bytes) override {
        slots_.resize(size_bytes);
        return reinterpret_cast<std::uint64_t>(slots_.data());
    }

    void write_pages(const test::CopyBytes& bytes) override { program_.control().poke(pages_, bytes); }
    void write_slots(const test::CopyBytes& bytes) override { std::ranges::copy(bytes, slots_.begin()); }
    test::CopyBytes read_pages() override {
        test::CopyBytes bytes(page_bytes_);
        program_.control().peek(pages_, bytes);
        return bytes;
    }
    test::CopyBytes read_slots() override { return slots_; }

    std::unique_ptr<CopyEngine> open(PageTable pages, CopyLimits limits) override {
        static constexpr std::byte kImage{1};
        CudaSettings settings;
        settings.limits = limits;
        settings.ways.clear();
        for (const CopyDirection direction : {CopyDirection::save, CopyDirection::load}) {
            settings.ways.push_back({direction, UINT64_MAX, UINT64_MAX, way_});
        }
        settings.buffer_bytes = 65536;
        settings.kernel_entries = 100;
        settings.batch_entries = 64;
        settings.kernel_blocks = 2;
        settings.kernel_threads = 32;
        settings.piece_bytes = slots_.size() / 5 + 1;
        settings.poll_interval = std::chrono::microseconds(1);
        settings.kernels = {&kImage, 1};
        auto engine = CudaEngine::open(program_.api(), settings, std::move(pages));
        CHECK(engine.ok());
        CHECK(engine.value()->add_host_range(reinterpret_cast<std::uint64_t>(slots_.data()), slots_.size() / 2).ok());
        return std::move(engine.value());
    }

private:
    const CopyWay way_;
    fake::Program program_;
    CudaAddress pages_ = 0;
    std::size_t page_bytes_ = 0;
    test::CopyBytes slots_;
};

// Each way in turn, each time with other habits of the driver.
template <typename Check>
void check_ways(Check check) {
    for (const CopyWay way : {CopyWay::batch, CopyWay::staged, CopyWay::mapped}) {
        check([way, seed = 0u]() mutable { return std::make_unique<FakeGround>(way, ++seed); });
    }
}

}  // namespace

TEST(every_byte_goes_where_it_should) {
    check_ways([](const test::MakeGround& make) { test::check_every_byte(make, kRounds); });
}

TEST(plans_that_share_bytes_keep_their_order) {
    check_ways([](const test::MakeGround& make) { test::check_order(make, kRounds / 2); });
}

TEST(tickets_are_told_once) { check_ways(test::check_tickets); }

TEST(wrong_plans_are_refused) { check_ways(test::check_refusals); }

TEST(what_is_not_polled_is_bounded) { check_ways(test::check_limits); }

TEST(after_close_nothing_is_touched) {
    check_ways([](const test::MakeGround& make) { test::check_close(make, kRounds / 2); });
}

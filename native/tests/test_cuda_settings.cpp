#include "copy/cuda_settings.hpp"

#include <array>

#include "check.hpp"

using namespace kvo;

TEST(the_defaults_hold) { CHECK(check_settings({}).ok()); }

TEST(every_limit_has_to_be_one) {
    using Change = void (*)(CudaSettings&);
    const std::array<Change, 14> changes = {
        [](CudaSettings& settings) { settings.limits.plans = 0; },
        [](CudaSettings& settings) { settings.buffer_bytes = 0; },
        [](CudaSettings& settings) { settings.buffers = 0; },
        [](CudaSettings& settings) { settings.kernel_entries = 0; },
        [](CudaSettings& settings) { settings.list_bytes = 48 * settings.kernel_entries - 1; },
        [](CudaSettings& settings) { settings.batch_entries = 0; },
        [](CudaSettings& settings) { settings.batch_bytes = 0; },
        [](CudaSettings& settings) { settings.parts = 0; },
        [](CudaSettings& settings) { settings.queued_transfers = 0; },
        [](CudaSettings& settings) { settings.kernel_blocks = 0; },
        [](CudaSettings& settings) { settings.piece_bytes = 0; },
        [](CudaSettings& settings) { settings.kernel_threads = 0; },
        [](CudaSettings& settings) { settings.kernel_threads = 33; },
        [](CudaSettings& settings) { settings.kernel_threads = 1056; },
    };
    for (std::size_t i = 0; i < changes.size(); ++i) {
        CudaSettings settings;
        changes[i](settings);
        if (check_settings(settings).code() != Code::invalid) {
            test::fail(__FILE__, __LINE__, "change " + std::to_string(i) + " passes");
        }
    }
}

TEST(a_kernel_takes_one_multiprocessor_of_eight) {
    CHECK_EQUAL(choose_kernel_blocks(132, 16), 16u);
    CHECK_EQUAL(choose_kernel_blocks(80, 16), 10u);
    CHECK_EQUAL(choose_kernel_blocks(132, 4), 4u);
    CHECK_EQUAL(choose_kernel_blocks(3, 16), 1u);
    CHECK_EQUAL(choose_kernel_blocks(0, 16), 1u);
    CHECK_EQUAL(choose_kernel_blocks(-1, 16), 1u);
}

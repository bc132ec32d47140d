#include "copy/cuda_ranges.hpp"

#include <utility>

#include "check.hpp"
#include "cuda_scene.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;
using Page = test::HostPage;
using test::kPatienceMs;

namespace {

constexpr std::uint64_t kPage = sizeof(Page);

std::uint64_t address_of(const Page& page) { return reinterpret_cast<std::uint64_t>(&page); }

void wait_until_done(const CudaRanges& ranges) {
    for (test::Patience patience; !ranges.progress().is_done;) {
        patience.wait();
    }
}

void wait_until_left(const CudaRanges& ranges) {
    for (test::Patience patience; ranges.progress().is_leaving;) {
        patience.wait();
    }
}

}  // namespace

TEST(a_span_ends_where_a_piece_begins_or_ends) {
    const HostPieces pieces = {{100, 200, 5100}, {200, 250, 9200}, {400, 500, 7400}};
    struct Case {
        std::uint64_t address, length;
        HostSpan expected;
    };
    for (const auto& [address, length, expected] : {
             Case{0, 50, {50, false, 0}},
             Case{0, 150, {100, false, 0}},
             Case{100, 10, {10, true, 5100}},
             Case{150, 100, {50, true, 5150}},
             Case{200, 100, {50, true, 9200}},
             Case{249, 9, {1, true, 9249}},
             Case{250, 900, {150, false, 0}},
             Case{499, 2, {1, true, 7499}},
             Case{500, 3, {3, false, 0}},
         }) {
        const HostSpan span = span_at(pieces, address, length);
        CHECK_EQUAL(span.length, expected.length);
        CHECK_EQUAL(span.is_registered, expected.is_registered);
        CHECK_EQUAL(span.mapped, expected.mapped);
    }
    CHECK_EQUAL(span_at({}, 7, 9).length, 9u);
}

TEST(memory_is_registered_piece_by_piece_and_given_back) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(8);
    const std::uint64_t begin = address_of(memory[0]);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), 3 * kPage + 5).value());
    CHECK(ranges->progress().is_done);
    // The first page and the last are not whole.
    CHECK(ranges->add(begin + 1, 8 * kPage - 2).ok());
    wait_until_done(*ranges);
    CHECK_EQUAL(ranges->progress().asked_bytes, 8 * kPage - 2);
    CHECK_EQUAL(ranges->progress().registered_bytes, 6 * kPage);
    CHECK(ranges->progress().problem.empty());
    CHECK_EQUAL(program.control().live().registrations, 2u);
    const auto pieces = ranges->pieces();
    CHECK_EQUAL(pieces->size(), 2u);
    CHECK_EQUAL(pieces->front().begin, begin + kPage);
    CHECK_EQUAL(pieces->back().begin, begin + 4 * kPage);
    CHECK_EQUAL(pieces->back().end, begin + 7 * kPage);
    CHECK(pieces->back().mapped != pieces->back().begin);
    CHECK(ranges->close(kPatienceMs));
    CHECK_EQUAL(program.control().live().registrations, 0u);
    CHECK(ranges->pieces()->empty());
    CHECK(ranges->close(0));
}

TEST(what_is_removed_is_unregistered_when_nobody_has_it_any_more) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(8);
    const std::uint64_t begin = address_of(memory[0]);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
    CHECK(ranges->add(begin, 3 * kPage).ok());
    CHECK(ranges->add(begin + 4 * kPage, 2 * kPage).ok());
    wait_until_done(*ranges);
    auto in_use = ranges->pieces();
    CHECK(ranges->remove(begin, 3 * kPage).ok());
    CHECK(ranges->progress().is_leaving);
    CHECK_EQUAL(ranges->progress().asked_bytes, 2 * kPage);
    for (test::Patience patience; ranges->pieces()->size() > 2;) {
        patience.wait();
    }
    // Another one leaves, and what is in use stays.
    CHECK(ranges->remove(begin + 4 * kPage, 2 * kPage).ok());
    for (test::Patience patience; !ranges->pieces()->empty();) {
        patience.wait();
    }
    CHECK_EQUAL(in_use->size(), 5u);
    CHECK(ranges->progress().is_leaving);
    CHECK_EQUAL(program.control().live().registrations, 5u);
    in_use.reset();
    wait_until_left(*ranges);
    CHECK_EQUAL(program.control().live().registrations, 0u);
    CHECK_EQUAL(ranges->progress().registered_bytes, 0u);
    // And where it was there is room again.
    CHECK(ranges->add(begin, 4 * kPage).ok());
    wait_until_done(*ranges);
    CHECK(ranges->progress().problem.empty());
    CHECK_EQUAL(program.control().live().registrations, 4u);
    CHECK(ranges->close(kPatienceMs));
    CHECK_EQUAL(program.control().live().registrations, 0u);
}

TEST(a_range_is_removed_whatever_has_been_done_of_it) {
    for (int pieces_done = 0; pieces_done < 4; ++pieces_done) {
        fake::Program program(FAKE_CUDA, {});
        std::vector<Page> memory(64);
        const std::uint64_t begin = address_of(memory[0]);
        const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
        CHECK(ranges->add(begin, 64 * kPage).ok());
        ranges->wait_for(pieces_done * kPage, kPatienceMs);
        CHECK(ranges->remove(begin, 64 * kPage).ok());
        CHECK(ranges->add(begin, 2 * kPage).ok());
        wait_until_left(*ranges);
        wait_until_done(*ranges);
        CHECK(ranges->progress().problem.empty());
        CHECK_EQUAL(ranges->progress().registered_bytes, 2 * kPage);
        CHECK_EQUAL(program.control().live().registrations, 2u);
        CHECK(ranges->close(kPatienceMs));
    }
}

TEST(what_leaves_is_given_back_by_a_close) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(4);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
    CHECK(ranges->add(address_of(memory[0]), 4 * kPage).ok());
    wait_until_done(*ranges);
    const auto in_use = ranges->pieces();
    CHECK(ranges->remove(address_of(memory[0]), 4 * kPage).ok());
    CHECK(ranges->close(kPatienceMs));
    CHECK_EQUAL(program.control().live().registrations, 0u);
}

TEST(only_what_was_added_is_removed_and_once) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(4);
    const std::uint64_t begin = address_of(memory[0]);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
    CHECK(ranges->add(begin, 2 * kPage).ok());
    CHECK(ranges->remove(begin, kPage).code() == Code::invalid);
    CHECK(ranges->remove(begin + 2 * kPage, kPage).code() == Code::invalid);
    CHECK(ranges->remove(begin, 2 * kPage).ok());
    CHECK(ranges->remove(begin, 2 * kPage).code() == Code::invalid);
    wait_until_left(*ranges);
}

TEST(a_wait_for_registration_ends_when_there_is_nothing_to_wait_for) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(4);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
    ranges->wait_for(kPage, kPatienceMs);  // nothing was added
    CHECK_EQUAL(program.api().cuMemHostRegister(&memory[2], kPage, 0), kCudaSuccess);
    CHECK(ranges->add(address_of(memory[0]), 4 * kPage).ok());
    ranges->wait_for(2 * kPage, kPatienceMs);
    CHECK(ranges->progress().registered_bytes >= 2 * kPage);
    ranges->wait_for(4 * kPage, kPatienceMs);  // which is refused
    CHECK(ranges->progress().is_done);
    CHECK_EQUAL(ranges->progress().registered_bytes, 2 * kPage);
}

TEST(who_sees_the_last_byte_registered_sees_that_nothing_waits) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(4);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), 4 * kPage).value());
    for (int round = 0; round < 200; ++round) {
        CHECK(ranges->add(address_of(memory[0]), 4 * kPage).ok());
        RegistrationProgress progress = ranges->progress();
        for (test::Patience patience; progress.registered_bytes < 4 * kPage; progress = ranges->progress()) {
            patience.wait();
        }
        CHECK(progress.is_done);
        CHECK(ranges->remove(address_of(memory[0]), 4 * kPage).ok());
        wait_until_left(*ranges);
    }
}

TEST(a_range_without_a_whole_page_stays_as_it_is) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(2);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
    CHECK(ranges->add(address_of(memory[0]) + 1, kPage).ok());
    CHECK(ranges->progress().is_done);
    CHECK(ranges->pieces()->empty());
    CHECK_EQUAL(ranges->progress().asked_bytes, kPage);
}

TEST(ranges_that_are_none_are_refused) {
    fake::Program program(FAKE_CUDA, {});
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
    for (const auto& [begin, length] : {std::pair{std::uint64_t{4096}, std::uint64_t{0}},
                                        {UINT64_MAX - 4096, 4097},
                                        {4096, UINT64_MAX},
                                        {UINT64_MAX, 1}}) {
        CHECK(ranges->add(begin, length).code() == Code::invalid);
    }
    CHECK_EQUAL(ranges->progress().asked_bytes, 0u);
}

TEST(a_refusal_ends_its_range_and_no_other) {
    fake::Program program(FAKE_CUDA, {});
    std::vector<Page> memory(8);
    const std::uint64_t begin = address_of(memory[0]);
    CHECK_EQUAL(program.api().cuMemHostRegister(&memory[2], kPage, 0), kCudaSuccess);
    const auto ranges = std::move(CudaRanges::start(program.api(), program.context(), kPage).value());
    CHECK(ranges->add(begin, 5 * kPage).ok());
    CHECK(ranges->add(begin + 6 * kPage, 2 * kPage).ok());
    wait_until_done(*ranges);
    CHECK_EQUAL(ranges->progress().problem,
                "cuMemHostRegister of 4096 bytes: CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED");
    CHECK_EQUAL(ranges->pieces()->size(), 4u);
    CHECK(ranges->close(kPatienceMs));
    CHECK_EQUAL(program.control().live().registrations, 1u);
}

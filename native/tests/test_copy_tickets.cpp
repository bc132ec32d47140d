#include "copy/copy_tickets.hpp"

#include <atomic>
#include <chrono>
#include <thread>

#include "check.hpp"
#include "fake_cuda/fake_program.hpp"

using namespace kvo;

namespace {

constexpr int kPatienceMs = 60'000;

}  // namespace

TEST(a_ticket_is_told_once_and_its_event_released) {
    fake::Program program(FAKE_CUDA, {});
    CudaEventPool events(program.api());
    CopyTickets tickets(4);
    const CopyTicket first = tickets.open().value();
    const CopyTicket second = tickets.open().value();
    CHECK_EQUAL(first, CopyTicket{1});
    CHECK_EQUAL(second, CopyTicket{2});
    CHECK(tickets.wait_for_event(second, 0).fault().code() == Code::unavailable);

    const SharedEvent done = events.take().value();
    tickets.give_to_device(second, done);
    CHECK(tickets.wait_for_event(second, 0).value() == done);
    tickets.finish(second, {}, {}, {});
    CHECK(tickets.wait_for_event(second, 0).value() == done);

    const auto finished = tickets.take_finished();
    CHECK_EQUAL(finished.size(), 1u);
    CHECK_EQUAL(finished[0].ticket, second);
    CHECK(tickets.take_finished().empty());
    CHECK_EQUAL(done.use_count(), 1);
    CHECK(tickets.wait_for_event(second, 0).fault().code() == Code::invalid);
    CHECK(tickets.wait_for_event(first, 0).fault().code() == Code::unavailable);
    CHECK(tickets.wait_for_event(3, 0).fault().code() == Code::invalid);
    CHECK(tickets.wait_for_event(0, 0).fault().code() == Code::invalid);
}

TEST(a_failed_ticket_gives_its_fault_for_an_event) {
    CopyTickets tickets(4);
    const CopyTicket ticket = tickets.open().value();
    tickets.finish(ticket, Status(Code::failed, "it broke"), {}, {});
    CHECK_EQUAL(tickets.wait_for_event(ticket, 0).fault().message(), "it broke");
    CHECK_EQUAL(tickets.take_finished()[0].status.message(), "it broke");
}

TEST(events_are_given_back_when_nothing_is_with_the_device) {
    fake::Program program(FAKE_CUDA, {});
    CudaEventPool events(program.api());
    CopyTickets tickets(4);
    const CopyTicket ticket = tickets.open().value();
    const SharedEvent done = events.take().value();
    tickets.give_to_device(ticket, done);
    tickets.finish(ticket, {}, {}, {});
    tickets.release_events();
    CHECK_EQUAL(done.use_count(), 1);
    CHECK(tickets.wait_for_event(ticket, 0).value() == nullptr);
}

TEST(whoever_waits_for_an_event_is_woken) {
    fake::Program program(FAKE_CUDA, {});
    CudaEventPool events(program.api());
    CopyTickets tickets(4);
    const CopyTicket ticket = tickets.open().value();
    const SharedEvent done = events.take().value();
    SharedEvent seen;
    std::atomic<bool> has_begun{false};
    std::thread waiting([&] {
        has_begun = true;
        seen = tickets.wait_for_event(ticket, kPatienceMs).value();
    });
    while (!has_begun) {
        std::this_thread::yield();
    }
    const auto begin = std::chrono::steady_clock::now();
    tickets.give_to_device(ticket, done);
    waiting.join();
    CHECK(seen == done);
    // Not by the end of its patience.
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(kPatienceMs / 2));
}

TEST(waiting_ends_when_all_before_it_have) {
    CopyTickets tickets(4);
    CHECK(tickets.wait_until_finished(0));
    const CopyTicket first = tickets.open().value();
    const CopyTicket second = tickets.open().value();
    tickets.finish(second, {}, {}, {});
    CHECK(!tickets.wait_until_finished(0));
    tickets.finish(first, {}, {}, {});
    CHECK(tickets.wait_until_finished(0));
    CHECK_EQUAL(tickets.take_finished().size(), 2u);
}

TEST(what_is_not_told_counts_against_the_limit) {
    CopyTickets tickets(2);
    const CopyTicket ticket = tickets.open().value();
    const CopyTicket forgotten = tickets.open().value();
    CHECK(tickets.open().fault().code() == Code::unavailable);
    tickets.forget(forgotten);
    const CopyTicket third = tickets.open().value();
    CHECK_EQUAL(third, CopyTicket{3});
    tickets.finish(ticket, {}, {}, {});
    CHECK(tickets.open().fault().code() == Code::unavailable);
    CHECK_EQUAL(tickets.take_finished().size(), 1u);
    CHECK(tickets.open().ok());
}

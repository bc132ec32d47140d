#include "copy/cuda_job.hpp"

#include <thread>
#include <utility>

#include "check.hpp"

using namespace kvo;
using namespace std::chrono_literals;

namespace {

constexpr int kPatienceMs = 60000;

CudaJobs job_of(CopyTicket ticket) {
    CudaJobs job(1);
    job.front().ticket = ticket;
    return job;
}

}  // namespace

TEST(jobs_are_taken_in_the_order_in_which_they_came) {
    CudaLaneQueue queue;
    CHECK(!queue.first_ticket() && queue.take_first().empty());
    queue.submit(job_of(3));
    queue.submit(job_of(5));
    CHECK(queue.first_ticket() == CopyTicket{3});
    CHECK_EQUAL(queue.take_first().front().ticket, CopyTicket{3});
    CHECK_EQUAL(queue.take_first().front().ticket, CopyTicket{5});
    CHECK(!queue.first_ticket());
}

TEST(a_lane_that_was_woken_in_this_round_goes_on) {
    CudaLaneQueue queue;
    queue.begin_round();
    queue.wake();
    CHECK(queue.wait(false, 10min));  // or the test does not end
    queue.begin_round();
    queue.submit(job_of(1));
    CHECK(queue.wait(false, 10min));
    queue.begin_round();
    CHECK(queue.wait(false, std::nullopt));
    CHECK(queue.wait(false, 1us));
}

TEST(an_idle_lane_waits_for_a_job_however_often_it_is_woken) {
    CudaLaneQueue queue;
    queue.wake();
    std::thread submits([&queue] {
        queue.wake();
        queue.submit(job_of(7));
    });
    CHECK(queue.wait(true, 1us));
    CHECK(queue.first_ticket() == CopyTicket{7});
    submits.join();
}

TEST(it_ends_when_nothing_is_left_and_not_before) {
    CudaLaneQueue queue;
    CHECK(queue.wait_closed(0));  // there is no thread
    queue.open();
    queue.submit(job_of(1));
    queue.begin_close();
    CHECK(queue.closing().has_begun && !queue.closing().is_urgent);
    CHECK(queue.wait(true, std::nullopt));  // what is queued has to be told
    CHECK(!queue.wait_closed(0));
    CHECK(queue.closing().is_urgent);
    queue.take_first();
    CHECK(queue.wait(false, std::nullopt));  // something still runs
    CHECK(!queue.wait(true, std::nullopt));
    std::thread ends([&queue] { queue.end(); });
    CHECK(queue.wait_closed(kPatienceMs));
    CHECK(!queue.closing().is_urgent);
    ends.join();
}

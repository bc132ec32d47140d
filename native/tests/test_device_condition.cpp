#include "disk/device_condition.hpp"

#include "check.hpp"

using namespace kvo;
using namespace std::chrono_literals;

namespace {

struct Scene {
    Scene() {
        terms.now = [this] { return clock; };
        terms.probe_interval = 2s;
    }
    DeviceTerms terms;
    Instant clock = std::chrono::steady_clock::now();
};

}  // namespace

TEST(what_can_be_done_follows_from_the_state) {
    Scene scene;
    DeviceCondition condition(scene.terms);
    CHECK(!condition.can_read() && !condition.can_write());
    condition.set(DeviceState::ready, {});
    CHECK(condition.can_read() && condition.can_write());
    condition.set(DeviceState::read_only, "no room");
    CHECK(condition.can_read() && !condition.can_write());
    condition.publish({});
    CHECK(condition.health().state == DeviceState::read_only);
    CHECK_EQUAL(condition.health().reason, std::string("no room"));
    condition.set(DeviceState::absent, "gone");
    CHECK(!condition.can_read() && !condition.can_write());
    CHECK(condition.health().state == DeviceState::read_only);  // until it is published
    condition.set(DeviceState::ready, {});
    condition.end();
    CHECK(!condition.can_read() && !condition.can_write());
}

TEST(a_problem_stops_what_it_is_of_until_it_is_taken) {
    Scene scene;
    DeviceCondition condition(scene.terms);
    condition.set(DeviceState::ready, {});
    condition.note_write_problem("write");
    CHECK(condition.is_reading() && !condition.is_writing());
    condition.note_read_problem("read");
    CHECK(!condition.is_reading());
    CHECK_EQUAL(condition.take_write_problem(), std::string("write"));
    CHECK_EQUAL(condition.take_read_problem(), std::string("read"));
    CHECK(condition.is_reading() && condition.is_writing());
    CHECK(condition.take_read_problem().empty() && condition.take_write_problem().empty());
}

TEST(what_fails_again_and_again_is_left_alone_for_longer_up_to_a_minute) {
    Scene scene;
    DeviceCondition condition(scene.terms);
    CHECK(condition.next_probe() == scene.clock);
    for (const auto delay : {2s, 4s, 8s, 16s, 32s, 60s, 60s}) {
        condition.set(DeviceState::ready, {});
        condition.set(DeviceState::read_only, "it fails");
        condition.probe_later();
        CHECK(condition.next_probe() == scene.clock + delay);
        scene.clock += delay;
    }
    condition.set(DeviceState::ready, {});
    condition.probe_next();
    CHECK(condition.next_probe() == scene.clock + 2s);
    scene.clock += 61s;  // it was ready for so long
    condition.set(DeviceState::absent, "it fails");
    condition.probe_later();
    CHECK(condition.next_probe() == scene.clock + 2s);
}

#include "base/spin.hpp"

#include "check.hpp"

using namespace kvo;

TEST(a_spin_waits_a_while_and_then_gives_up_for_good) {
    Spin spin;
    int turns = 0;
    while (spin.pause()) {
        CHECK(++turns < 1000);
    }
    CHECK(turns > 16);
    CHECK(!spin.pause());
    CHECK(!spin.pause());
}

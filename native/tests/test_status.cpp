#include "base/status.hpp"

#include "check.hpp"

using namespace kvo;

TEST(a_status_is_good_until_told_otherwise) {
    CHECK(Status().ok());
    CHECK(Status().message().empty());
    const Status fault(Code::invalid, "why");
    CHECK(!fault.ok());
    CHECK(fault.code() == Code::invalid);
    CHECK_EQUAL(fault.message(), "why");
}

TEST(a_result_holds_a_value_or_a_fault) {
    Result<int> value = 3;
    CHECK(value.ok());
    value.value() += 1;
    CHECK_EQUAL(value.value(), 4);
    const Result<int> fault = Status(Code::failed, "why");
    CHECK(!fault.ok());
    CHECK_EQUAL(fault.fault().message(), "why");
}

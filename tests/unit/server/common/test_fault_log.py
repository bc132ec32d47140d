"""Faults of the server end here."""

from __future__ import annotations

import pytest

from kvoffload.protocol import Error, ErrorCode, Stats
from kvoffload.server.common.fault_log import FaultLog


def fail(kind: type[Exception]) -> None:
    raise kind("broken")


def test_each_kind_of_fault_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    faults = FaultLog()
    for kind in (RuntimeError, RuntimeError, KeyError):
        assert isinstance(faults.attempt("a", lambda kind=kind: fail(kind)), kind)  # type: ignore[misc]
    faults.attempt("b", lambda: fail(RuntimeError))
    assert [record.args for record in caplog.records] == [("a",), ("a",), ("b",)]
    assert all(record.exc_info for record in caplog.records)


def test_what_went_well_is_passed_on() -> None:
    assert FaultLog().serve(Stats(), lambda: 5) == 5


def test_whoever_met_a_fault_is_answered() -> None:
    answer = FaultLog().serve(Stats(), lambda: fail(OSError))
    assert answer == Error(code=ErrorCode.INTERNAL, message="stats: OSError: broken", retryable=True, about_op=Stats.op)


def test_the_end_of_the_process_is_no_fault() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        FaultLog().attempt("a", interrupt)

"""A finding that is not well says what to do."""

from __future__ import annotations

import pytest

from kvoffload.doctor.findings import Finding, Verdict, fail, ok, warn


def test_each_kind() -> None:
    assert [one.verdict for one in (ok("a", "b"), warn("a", "b", "c"), fail("a", "b", "c"))] == list(Verdict)


@pytest.mark.parametrize(("verdict", "remedy"), [(Verdict.OK, "do it"), (Verdict.FAIL, ""), (Verdict.WARN, "")])
def test_a_remedy_belongs_to_what_is_not_well(verdict: Verdict, remedy: str) -> None:
    with pytest.raises(AssertionError):
        Finding(check="a", verdict=verdict, text="b", remedy=remedy)

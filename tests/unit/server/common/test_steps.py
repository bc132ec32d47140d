"""Work in parts: one part with each call, and the result at the end."""

from __future__ import annotations

import pytest

from kvoffload.server.common.steps import MORE, Steps, run_steps, take_parts


def count(parts: int, done: list[int]) -> Steps[str]:
    for number in range(parts):
        done.append(number)
        yield
    return "result"


def test_each_call_does_one_part() -> None:
    done = list[int]()
    take = take_parts(count(2, done))
    assert done == []
    assert (take(), done) == (MORE, [0])
    assert (take(), done) == (MORE, [0, 1])
    assert take() == "result"


def test_all_parts_together_have_the_same_result() -> None:
    done = list[int]()
    assert run_steps(count(3, done)) == "result"
    assert done == [0, 1, 2]


def test_a_fault_comes_from_the_part_in_which_it_was() -> None:
    def fail() -> Steps[None]:
        yield
        raise OSError("broken")

    take = take_parts(fail())
    assert take() is MORE
    with pytest.raises(OSError, match="broken"):
        take()

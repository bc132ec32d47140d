"""A pool's figures for less and more memory, and what that is worth, agree with replays."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from benchmarks.eviction import list_traces
from benchmarks.evictions.traces import Agents, Chat, Retrieval, Scans
from benchmarks.memory_curve import Exactness, measure
from kvoffload.top.memory_worth import MEMORIES

SHARED_TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation.jsonl"


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_where_each_block_is_followed_it_is_what_replays_say(*, is_hybrid: bool) -> None:
    found = measure("chat", Chat(requests=1000).make(1), percent=10.0, is_hybrid=is_hybrid)
    assert found.one_in == 1
    assert list(found.told) == [0.25, 0.5, 1.0, 2.0, 4.0]
    # Blocks behind the last state are computed again and not saved again, so they are not counted.
    most = 8.0 if is_hybrid else 1.0
    assert max(map(abs, found.errors.values())) < most, found
    assert found.told[4.0] > found.told[0.25]


def check_worth(found: Exactness) -> None:
    """The prefill that other sizes save is told to a tenth of what replays save, and never twice as wrong as is said,
    which would be four standard deviations."""
    errors = found.worth_errors
    assert tuple(errors) == MEMORIES, found.worth.unknown
    assert all(abs(off) < min(10.0, 2 * may) for off, may in errors.values()), (found.trace, errors)


def test_seconds_that_other_sizes_save_are_those_of_replays() -> None:
    kinds = (Chat(requests=1000), Agents(requests=1000), Retrieval(requests=1000), Scans(requests=1000))
    errors: list[tuple[float, float]] = []
    for kind, percent in product(kinds, (5.0, 20.0)):
        found = measure(f"{kind}, {percent:g}%", kind.make(2), percent=percent, is_hybrid=False)
        assert found.one_in == 1
        check_worth(found)
        errors += found.worth_errors.values()
    # That is promised for 19 of 20.
    assert sum(abs(off) <= may for off, may in errors) >= 0.9 * len(errors), errors


def test_with_a_sample_they_are_as_exact_as_is_said() -> None:
    found = measure("trace", Retrieval(requests=5000, documents=4000).make(1), percent=30.0, is_hybrid=False)
    assert found.one_in >= 4
    check_worth(found)


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the trace of conversations is not beside the checkout")
def test_they_are_those_of_replays_on_conversations() -> None:
    requests = next(requests for _, requests in list_traces(SHARED_TRACE, seed=1))
    check_worth(measure("conversation", requests[:4000], percent=10.0, is_hybrid=False))


def test_with_windows_and_states_nothing_is_told() -> None:
    found = measure("chat", Chat(requests=200).make(1), percent=10.0, is_hybrid=True)
    assert found.worth.sizes == ()
    assert "recurrent states" in found.worth.unknown

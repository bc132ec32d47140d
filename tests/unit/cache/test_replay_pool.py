"""A replay's pool of several groups, without a trace: by one group it is the replay itself."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload import native
from kvoffload.cache.replay import pack_trace, replay
from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest
from tests.kit.cache.chains import make_requests

POLICIES = native.policy_names()


def groups(*numbers: int) -> npt.NDArray[np.uint32]:
    return np.array(numbers, np.uint32)


def names(*numbers: int) -> npt.NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def admit(pool: native.ReplayPool, group: int, *numbers: int) -> tuple[int, int, int]:
    """Each the child of the one before."""
    return pool.admit(groups(*[group] * len(numbers)), names(*numbers), names(0, *numbers[:-1]))


def held(pool: native.ReplayPool, group: int, *numbers: int) -> list[bool]:
    return [bool(flag) for flag in pool.holds(groups(*[group] * len(numbers)), names(*numbers))]


@pytest.mark.parametrize("percent", [5, 20, 60])
@pytest.mark.parametrize("policy", POLICIES)
def test_one_group_is_the_replay(policy: str, percent: int) -> None:
    requests = make_requests(3)
    trace = pack_trace(
        TraceRequest(timestamp_ms=at, input_length=len(ids) * BLOCK_TOKENS, output_length=1, hash_ids=tuple(ids))
        for at, ids in enumerate(requests)
    )
    (whole, _) = replay(trace, policies=[policy], capacity_percents=[percent])
    pool = native.ReplayPool([("prefix", 1, 0)], policy, whole.capacity_units)
    hits = 0
    for ids in requests:
        present = held(pool, 0, *ids)
        boundary = present.index(False) if False in present else len(ids)
        hits += boundary
        if boundary:
            pool.touch(groups(*[0] * boundary), names(*ids[:boundary]))
        rest, parents = ids[boundary:], ([0, *ids][boundary:])[: len(ids) - boundary]
        pool.admit(groups(*[0] * len(rest)), names(*rest), names(*parents))
        assert pool.used_bytes <= whole.capacity_units
    # The replay keeps what its own request found; who asks here has what it found already. A policy that learns goes
    # on from there another way.
    assert hits == pytest.approx(whole.hits, rel=0.02)
    assert hits > 0


def test_records_have_the_bytes_of_their_group() -> None:
    pool = native.ReplayPool([("prefix", 10, 0), ("window", 3, 2)], "lru", 30)
    assert admit(pool, 0, 1, 2) == (2, 0, 0)
    assert admit(pool, 1, 1, 2) == (2, 0, 0)
    assert pool.used_bytes == 26
    assert admit(pool, 1, 3) == (1, 0, 0)
    assert pool.used_bytes == 29
    assert admit(pool, 0, 1) == (0, 0, 0)


def test_what_does_not_fit_is_refused_from_its_beginning_on() -> None:
    pool = native.ReplayPool([("prefix", 10, 0)], "lru", 25)
    assert admit(pool, 0, 1, 2, 3) == (2, 0, 1)
    assert held(pool, 0, 1, 2, 3) == [True, True, False]
    assert admit(pool, 0, 4) == (1, 1, 0)


def test_what_is_used_stays() -> None:
    pool = native.ReplayPool([("prefix", 1, 0)], "lru", 2)
    admit(pool, 0, 1)
    admit(pool, 0, 2)
    pool.touch(groups(0, 0), names(7, 1))
    admit(pool, 0, 3)
    assert held(pool, 0, 1, 2, 3) == [True, False, True]


@pytest.mark.parametrize(
    ("group", "name", "parents"), [(1, 5, 1), (0, 0, 1), (0, 5, 2)], ids=["group", "name", "parents"]
)
def test_records_that_are_none_are_refused(group: int, name: int, parents: int) -> None:
    pool = native.ReplayPool([("prefix", 1, 0)], "lru", 2)
    with pytest.raises(ValueError, match=r"must be|a record has"):
        pool.admit(groups(group), names(name), names(*[0] * parents))


@pytest.mark.parametrize(
    ("settings", "what"), [(("some", 1, 0), "is reused by"), (("prefix", 0, 0), "has bytes")], ids=["reuse", "size"]
)
def test_groups_that_are_none_are_refused(settings: tuple[str, int, int], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        native.ReplayPool([settings], "lru", 2)

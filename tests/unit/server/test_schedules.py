"""Random lives of a server, checked after every step. A failing seed replays: `Schedule(seed).run()`."""

from __future__ import annotations

import pytest

from tests.kit.server.schedule import Schedule

SCHEDULES = 300
CAMPAIGN_SCHEDULES = 20_000


@pytest.mark.parametrize("first", range(0, SCHEDULES, 50))
def test_whatever_happens_no_memory_is_used_twice_or_forgotten(first: int) -> None:
    for seed in range(first, first + 50):
        run(seed)


@pytest.mark.campaign
def test_many_more_of_them() -> None:
    for seed in range(SCHEDULES, CAMPAIGN_SCHEDULES):
        run(seed)


def run(seed: int) -> None:
    try:
        Schedule(seed).run()
    except BaseException as fault:
        fault.add_note(f"seed {seed}")
        raise

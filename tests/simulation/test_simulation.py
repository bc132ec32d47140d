"""Under any faults in any order, no byte is wrong, nothing is used twice, and at the end everything works again.

`python -m tests.simulation SEED` replays a schedule with its trace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.kit.children import child
from tests.simulation.runner import run_all

SCHEDULES = 10_000
CAMPAIGN_SCHEDULES = 1_000_000
FOUND = (79_444, 201_061, 202_784, 394_609, 444_814, 614_787, 616_000, 710_042)
"""Seeds that failed in a campaign once."""


def run(first: int, end: int) -> None:
    """Each process has every so-manieth seed, so that all have the same work."""
    count = os.cpu_count() or 1
    with ExitStack() as stack:
        processes = [
            stack.enter_context(child(["-m", "tests.simulation", str(first + at), str(end), str(count)]))
            for at in range(count)
        ]
        said = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * count, "\n".join(said)


def test_in_ten_thousand_schedules_all_is_well_in_the_end() -> None:
    run(0, SCHEDULES)


@pytest.mark.parametrize("seed", FOUND)
def test_what_has_failed_once_goes_well(seed: int) -> None:
    run_all([seed])


@pytest.mark.parametrize("seed", [0, 1, 3, 4], ids=["native", "bytes", "tier", "plain"])
def test_a_seed_says_all_that_happens(seed: int) -> None:
    """Also to a process that orders its sets in another way."""
    command = [sys.executable, "-m", "tests.simulation", str(seed)]
    first, second = (
        subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, check=True).stdout
        for salt in ("1", "2")
    )
    assert first == second
    assert first.count(b"\n") > 20


@pytest.mark.campaign
def test_in_a_million() -> None:
    run(SCHEDULES, CAMPAIGN_SCHEDULES)

"""Many schedules, one after the other; a failing one is named by its seed."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Iterable

from tests.simulation.world import World

CODED_EVERY = 20
"""So many schedules apart, messages travel as bytes."""
REAL_EVERY = 100
"""So many schedules apart, the native cache serves."""


def make_world(seed: int, *, traces: bool = False) -> World:
    is_real = seed % REAL_EVERY == 0
    return World(seed, traces=traces, codes=is_real or seed % CODED_EVERY == 1, is_real=is_real)


def run_seed(seed: int) -> Counter[str]:
    """Runs one schedule, and returns what was lost and why."""
    world = make_world(seed)
    try:
        world.run()
    finally:
        world.close()
    return world.ledger.lost


def run_all(seeds: Iterable[int]) -> Counter[str]:
    """Runs schedules, and returns what was lost in all of them. The first failure is said, with its seed, and
    raised."""
    lost = Counter[str]()
    logging.disable()
    try:
        for seed in seeds:
            lost += run_seed(seed)
    except BaseException as fault:
        sys.stdout.write(f"seed {seed}: {type(fault).__name__}: {fault}; see python -m tests.simulation {seed}\n")
        raise
    finally:
        logging.disable(logging.NOTSET)
    return lost

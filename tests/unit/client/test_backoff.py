"""Back-off."""

from __future__ import annotations

from random import Random

from kvoffload.client.backoff import Backoff


def test_it_doubles_up_to_its_bound_and_is_spread() -> None:
    backoff = Backoff(100, 1000, Random(1))
    waits = [backoff.next_ns() for _ in range(8)]
    for wait, middle in zip(waits, [100, 200, 400, 800, 1000, 1000, 1000, 1000], strict=True):
        assert 0.75 * middle <= wait <= 1.25 * middle
    assert len(set(waits[4:])) > 1
    backoff.reset()
    assert backoff.next_ns() <= 125

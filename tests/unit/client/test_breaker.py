"""The breaker."""

from __future__ import annotations

from random import Random

from kvoffload.client.backoff import Backoff
from kvoffload.client.breaker import Breaker


def test_it_opens_when_an_answer_is_late_and_closes_with_any() -> None:
    breaker = Breaker(Backoff(100, 100, Random(1)))
    assert not breaker.is_open
    assert not breaker.take_probe(10_000)
    breaker.on_late(1000)
    breaker.on_late(2000)
    assert (breaker.is_open, breaker.opened_ns) == (True, 1000)
    breaker.on_answer()
    assert not breaker.is_open
    breaker.on_late(3000)
    assert breaker.opened_ns == 3000


def test_probes_are_far_between() -> None:
    breaker = Breaker(Backoff(100, 100, Random(1)))
    breaker.on_late(0)
    assert not breaker.take_probe(70)
    probes = [now for now in range(0, 10_000, 5) if breaker.take_probe(now)]
    assert 75 <= len(probes) <= 135

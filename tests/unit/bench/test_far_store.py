"""The measurement of a remote tier: all its records there and back, in turn with the store's own client."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvoffload.bench.base import Bound, Goal, Measure
from kvoffload.bench.far_store import FarStore, Load
from kvoffload.errors import BenchmarkError
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from tests.kit.tiers.dict_store import Place

GOAL = Goal(Measure.RATIO, Bound.AT_LEAST, 0.7)


@dataclass
class Own:
    """A client that takes longest when it is alone."""

    place: Place
    asked: list[tuple[str, int, int]] = field(default_factory=list)

    def time_limit(self, verb: str, value_bytes: int, clients: int) -> float:
        self.asked.append((verb, value_bytes, clients))
        return 1 / clients

    def flush(self) -> None:
        self.place.values.clear()


def tier_over(place: Place) -> RemoteTier:
    return RemoteTier(RemoteTierSettings(place="dictionary", open_store=place.open))


def test_each_load_is_put_and_got_beside_the_best_of_the_own_client() -> None:
    place = Place()
    own = Own(place)
    store = FarStore(name="far", data_bytes=1 << 20, clients=(1, 4, 2))
    loads = [
        Load(record_bytes=64 << 10, value_bytes=64 << 10, goal=GOAL),
        Load(record_bytes=4096, value_bytes=1 << 19, goal=None),
    ]
    said: list[str] = []
    results = list(store.measure(tier_over(place), own, loads, said.append))
    assert said == ["put of 64 KiB", "get of 64 KiB", "put of 4 KiB", "get of 4 KiB"]
    assert [(result.params["what"], result.params["limit_clients"], result.goal) for result in results] == [
        ("put", 4, GOAL),
        ("get", 4, GOAL),
        ("put", 4, None),
        ("get", 4, None),
    ]
    assert all(result.limit == 4 << 20 and result.value > 0 for result in results)
    assert set(own.asked) == {
        (verb, size, clients) for verb in ("put", "get") for size in (64 << 10, 1 << 19) for clients in (1, 2, 4)
    }
    assert ("put", 256) in place.asked, "a batch is as large as a server makes it"
    assert place.opened == place.closed


def test_a_store_that_is_not_there_is_said() -> None:
    place = Place()
    place.fault = "connection refused"
    with pytest.raises(BenchmarkError, match="there is no tier: connection refused"):
        list(FarStore(name="far", data_bytes=1 << 20, clients=(1,)).measure(tier_over(place), Own(place), [], print))

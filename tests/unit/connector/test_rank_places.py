"""What is everywhere: of all ranks, and of nothing less."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.rank_places import RankPlaces
from kvoffload.connector.step_plan import Place

HERE, THERE, AGAIN = Place(1, 1), Place(2, 1), Place(1, 2)


def test_a_place_counts_when_every_rank_has_named_it() -> None:
    places = RankPlaces(2)
    places.note({0: [HERE, THERE]})
    assert not places.has_all(HERE)
    places.note({1: [HERE]})
    assert places.has_all(HERE)
    assert not places.has_all(THERE)
    places.note({1: [HERE, THERE]})
    assert places.has_all(THERE)


def test_each_rank_names_all_its_places_every_time() -> None:
    places = RankPlaces(2)
    places.note({0: [HERE], 1: [HERE]})
    places.note({1: [THERE]})
    assert not places.has_all(HERE)
    places.note({})
    assert not places.has_all(HERE)
    places.note({0: [THERE]})
    assert places.has_all(THERE)


def test_another_session_of_the_same_memory_is_another_place() -> None:
    places = RankPlaces(1)
    places.note({0: [HERE]})
    assert not places.has_all(AGAIN)


def test_pairs_are_places() -> None:
    """As they come from a client, and through a message."""
    places = RankPlaces(1)
    places.note({0: [(1, 1)]})  # type: ignore[list-item]
    assert places.has_all(HERE)


def test_a_rank_that_has_nowhere_to_copy_is_known_not_to() -> None:
    places = RankPlaces(2)
    places.note({0: [HERE]})
    assert not places.are_all_known
    places.note({1: []})
    assert not places.are_all_known
    places.note({1: [THERE]})
    assert places.are_all_known

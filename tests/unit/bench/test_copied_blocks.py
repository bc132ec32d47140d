"""The blocks that copy benchmarks copy are what they say, and an end that does not come is told."""

from __future__ import annotations

from typing import Any

import pytest

from kvoffload.bench.copied_blocks import LAYERS, finish, make_geometry, scatter_items
from kvoffload.errors import BenchmarkError
from kvoffload.kvspec import build_page_map


class Engine:
    """An engine whose copies have ended or not."""

    def __init__(self, *, has_ended: bool, fault: str = "") -> None:
        self.has_ended = has_ended
        self.fault = fault

    def fence(self, timeout_s: float) -> bool:
        return self.has_ended

    def poll(self) -> list[Any]:
        return [type("Finished", (), {"fault": self.fault})()]


def test_items_are_half_of_the_blocks_in_slots_of_their_own() -> None:
    items = scatter_items(40, 100, 1 << 20)
    assert len(set(items.block.tolist())) == len(items) == 20
    assert sorted(items.slot.tolist()) == [(1 << 20) + 100 * index for index in range(20)]
    assert sorted(items.block.tolist()) != items.block.tolist()


def test_a_geometry_is_of_equal_layers_one_behind_the_other() -> None:
    (pages,) = build_page_map(make_geometry(4096, 10)).groups
    assert (pages.num_runs, set(pages.length.tolist())) == (LAYERS, {4096})


@pytest.mark.parametrize(
    ("engine", "line"),
    [(Engine(has_ended=False), "did not end within"), (Engine(has_ended=True, fault="lost"), "a copy failed: lost")],
)
def test_what_does_not_end_well_is_told(engine: Any, line: str) -> None:
    with pytest.raises(BenchmarkError, match=line):
        finish(engine)


def test_what_ends_well_is_done() -> None:
    finish(Engine(has_ended=True))  # type: ignore[arg-type]

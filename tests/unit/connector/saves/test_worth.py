"""Which blocks are worth saving, as tables: what a request offers at each step of its way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.block_chain import BlockChain
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.request_settings import RequestSettings
from kvoffload.connector.common.tracked_request import NEVER, TrackedRequest
from kvoffload.connector.saves.worth import Candidates, SaveWorth
from kvoffload.kvspec import ReuseRule
from tests.kit.connector.facts import group_facts

FULL = group_facts(0)
WINDOW = group_facts(1, ReuseRule.WINDOW, window=6)
CHUNK = group_facts(1, ReuseRule.CHUNK, window=16)
STATE = group_facts(1, ReuseRule.EXACT_BOUNDARY)
LATE_WINDOW = group_facts(2, ReuseRule.WINDOW, window=6)
TABLES = tuple([100 * (group + 1) + at for at in range(40)] for group in range(3))


class Way:
    """One request, as far as it has come."""

    def __init__(
        self, *groups: Any, prompt: int = 30, branch: int = 0, limit: int | None = None, **settings: Any
    ) -> None:
        self.table = GroupTable(groups, hash_block_size=4, alignment=4)
        self.worth = SaveWorth(self.table, **settings)
        self.tracked = TrackedRequest(
            SimpleNamespace(request_id="a"),  # type: ignore[arg-type]
            BlockChain(self.table),
            RequestSettings(),
            self.worth.begin(prompt_tokens=prompt, branch=branch, limit=limit),
        )

    @property
    def due(self) -> int:
        return self.tracked.progress.due

    def collect(self, tokens: int, tables: Any = TABLES) -> list[Candidates]:
        return self.worth.collect(self.tracked, tokens, tables)

    def go(self, tokens: int, tables: Any = TABLES) -> dict[int, list[int]]:
        """Positions by group, of what is worth saving now."""
        found: dict[int, list[int]] = {}
        for one in self.collect(tokens, tables):
            assert one.blocks.tolist() == [tables[self.table.facts[one.group].index][at] for at in one.positions]
            found.setdefault(one.group, []).extend(one.positions)
        return found


def test_every_full_block_once() -> None:
    way = Way(FULL)
    assert way.due == 4
    assert way.go(3) == {}
    assert way.go(10) == {0: [0, 1]}
    assert way.due == 12
    assert way.go(11) == {}
    assert way.go(20) == {0: [2, 3, 4]}


@pytest.mark.parametrize(("limit", "blocks"), [(0, 0), (3, 0), (17, 4), (30, 7)])
def test_nothing_beyond_a_limit_is_looked_at_again(limit: int, blocks: int) -> None:
    way = Way(FULL, limit=limit)
    found = way.go(40)
    assert sum(map(len, found.values())) == blocks
    assert (way.due, way.tracked.progress.decoded_due) == (NEVER, NEVER)
    assert way.go(60) == {}


def test_windows_beyond_a_limit_are_not_saved() -> None:
    # The prompt's own window ends at 28, and the request's end would be a boundary, too.
    way = Way(FULL, WINDOW, limit=24)
    assert way.go(48) == {0: [*range(6)]}
    way.worth.note_end(way.tracked.progress, 48)
    assert way.go(48) == {1: [4, 5]}


def test_only_blocks_that_the_engine_has_yet() -> None:
    way = Way(FULL)
    assert way.go(20, ([7, 8, 9],)) == {0: [0, 1, 2]}
    assert way.go(20) == {0: [3, 4]}


@pytest.mark.parametrize(
    ("prompt", "positions"),
    [
        # The window before token n begins in the block of token n - 5.
        (30, [5, 6]),  # 28 for both: the last token is computed again
        (28, [4, 5, 6]),  # 24 for a repetition, 28 for what continues it
        (3, []),
        (4, [0]),
    ],
)
def test_windows_are_kept_for_the_end_of_the_prompt(prompt: int, positions: list[int]) -> None:
    way = Way(WINDOW, prompt=prompt)
    assert way.go(prompt).get(0, []) == positions
    assert way.due == NEVER
    assert way.go(80) == {}


def test_windows_are_kept_for_the_boundary_that_a_step_came_beyond() -> None:
    way = Way(WINDOW, prompt=30)
    assert way.due == 28
    assert way.go(27) == {}
    assert way.go(29) == {0: [5, 6]}


def test_windows_are_kept_where_prompts_part() -> None:
    way = Way(FULL, WINDOW, prompt=30, branch=12)
    assert way.go(11) == {0: [0, 1]}
    assert way.go(12) == {0: [2], 1: [1, 2]}
    assert way.go(30) == {0: [3, 4, 5, 6], 1: [5, 6]}


def test_windows_are_kept_for_the_end_of_the_request() -> None:
    way = Way(WINDOW, prompt=10)
    way.go(10)
    way.worth.note_end(way.tracked.progress, 27)
    assert way.due == 0
    assert way.go(27) == {0: [4, 5]}


def test_the_end_of_the_request_counts_once() -> None:
    way = Way(WINDOW, prompt=10)
    assert way.go(10) == {0: [0, 1]}
    way.worth.note_end(way.tracked.progress, 3)
    assert way.go(10) == {}
    way.worth.note_end(way.tracked.progress, 11)
    assert way.go(11) == {}


def test_windows_are_kept_where_the_engine_retains_them() -> None:
    way = Way(WINDOW, prompt=60, interval=16)
    assert way.go(15) == {}
    assert way.go(16) == {0: [2, 3]}
    assert way.due == 32
    assert way.go(50) == {0: [6, 7, 10, 11]}
    assert way.go(60) == {0: [12, 13, 14]}
    assert way.go(64) == {0: [15]}


def test_an_interval_that_hits_cannot_end_at_is_none() -> None:
    way = Way(WINDOW, prompt=60, interval=6)
    assert way.go(55) == {}
    assert way.due == 56


@pytest.mark.parametrize("window", [WINDOW, CHUNK])
def test_an_engine_that_retains_all_windows_has_all_of_them_saved(window: Any) -> None:
    way = Way(FULL, window, prompt=30, interval=None)
    assert way.go(10) == {0: [0, 1], 1: [0, 1]}
    assert way.due == 12
    assert way.go(30) == {0: [2, 3, 4, 5, 6], 1: [2, 3, 4, 5, 6]}


def test_a_chunk_is_kept_from_its_beginning() -> None:
    way = Way(CHUNK, prompt=30)
    assert way.go(30) == {0: [4, 5, 6]}


def test_a_window_that_two_boundaries_share_is_offered_once() -> None:
    way = Way(WINDOW, prompt=12, branch=8)
    assert way.go(12) == {0: [0, 1, 2]}


def test_with_states_nothing_is_worth_anything_before_one_is_handed_off() -> None:
    way = Way(FULL, STATE, LATE_WINDOW, prompt=30)
    assert way.due == NEVER
    assert way.go(30) == {}
    way.worth.note_state(way.tracked.progress, 16)
    assert way.due == 0
    assert way.go(30) == {0: [0, 1, 2, 3], 2: [2, 3]}
    assert way.due == NEVER
    way.worth.note_state(way.tracked.progress, 28)
    assert way.go(30) == {0: [4, 5, 6], 2: [5, 6]}
    way.worth.note_end(way.tracked.progress, 40)
    assert way.go(40) == {}


def test_states_come_in_any_order() -> None:
    way = Way(FULL, STATE, prompt=30)
    for boundary in (16, 8):
        way.worth.note_state(way.tracked.progress, boundary)
    assert way.go(30) == {0: [0, 1, 2, 3]}


def test_what_is_put_back_is_offered_again_from_there_on() -> None:
    way = Way(FULL, WINDOW, prompt=30)
    prefix, window = way.collect(30)
    prefix.put_back(3)
    assert way.due == 0
    assert way.go(30) == {0: [3, 4, 5, 6]}
    window.put_back(1)
    assert way.go(30) == {1: [6]}
    window.put_back(0)
    window.put_back(0)
    assert way.go(31) == {1: [5, 6]}
    assert way.due == 32


@pytest.mark.parametrize(("gathered", "dues"), [(1, 16), (8, 20), (11, 20), (16, 28), (0, 16)])
def test_what_decoding_fills_is_gathered_in_whole_blocks(gathered: int, dues: int) -> None:
    way = Way(FULL, prompt=14, gathered_tokens=gathered)
    assert way.go(14) == {0: [0, 1, 2]}
    assert (way.due, way.tracked.progress.decoded_due) == (16, dues)


@pytest.mark.parametrize("interval", [16, None])
def test_windows_are_not_gathered(interval: int | None) -> None:
    """They move on."""
    way = Way(FULL, WINDOW, prompt=14, interval=interval, gathered_tokens=100)
    way.go(14)
    assert way.tracked.progress.decoded_due == way.due == 16


def test_a_request_that_begins_anew_offers_everything_again() -> None:
    way = Way(FULL, WINDOW, prompt=30)
    first = way.go(30)
    way.tracked.progress = way.worth.begin(prompt_tokens=30)
    assert way.go(30) == first

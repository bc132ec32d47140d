"""A server's news of its blocks, as events for vLLM's routers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from kvoffload.client import InventoryBegun, InventoryEnded
from kvoffload.connector.engine import events as cache_events
from kvoffload.connector.engine import told_blocks, vllm_compat
from kvoffload.connector.engine.events import CacheEvents
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import EventsLost, Medium, NamespaceOpened, Removed, Stored
from tests.kit.connector.facts import group_facts
from tests.kit.connector.saving import DENSE
from tests.kit.connector.scripted import ScriptedEngine
from tests.kit.connector.told_events import (
    KINDS,
    MASK,
    OTHERS,
    OURS,
    A,
    B,
    C,
    D,
    hearing,
    hearing_groups,
    hearing_windows,
    masked,
    removed,
    saving,
    stored,
    take,
    told,
)


@pytest.mark.parametrize(("hear", "index", "block_size"), [(hearing, 1, 8), (hearing_windows, 3, 4)])
def test_a_stored_block_is_told_with_the_engines_group_its_medium_and_its_parent(
    hear: Callable[[], CacheEvents], index: int, block_size: int
) -> None:
    events = hear()
    events.hear(stored(), 2)
    first, second = take(events)
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash) == ([told(A)], None)
    # A window's blocks have others for parents, which say nothing of the window.
    assert (second.block_hashes, second.parent_block_hash) == ([told(B)], told(A) if index == 1 else None)
    for one in (first, second):
        assert (one.group_idx, one.block_size, one.medium, one.locality) == (index, block_size, MEDIUM_CPU, "LOCAL")
        assert (one.kv_cache_spec_kind, one.kv_cache_spec_sliding_window) == KINDS[index]
        assert (one.token_ids, one.lora_id, one.lora_name, one.extra_keys) == ([], None, None, None)
    assert take(events) == []


def test_what_all_stages_store_and_lose_is_told_once() -> None:
    events = hearing(replace(group_facts(1, block_size=8), stage=1))
    for group in range(2):
        events.hear(stored(group=group, hashes=A, parents=bytes(32)), 2)
        events.hear(removed(group=group, hashes=A), 3)
    told_events = take(events)
    assert [type(one) for one in told_events] == [BlockStored, BlockRemoved]
    assert [one.group_idx for one in told_events] == [1, 1]
    assert told_events[0].block_size == 8


def test_blocks_without_parents_have_none() -> None:
    events = hearing()
    events.hear(stored(parents=b""), 2)
    assert [one.parent_block_hash for one in take(events)] == [None, None]


def test_removed_blocks_are_told_in_their_order_with_what_was_stored() -> None:
    events = hearing()
    events.hear(stored(), 2)
    events.hear(removed(hashes=A + C + B), 3)
    events.hear(removed(), 4)
    *_, gone = take(events)
    assert isinstance(gone, BlockRemoved)
    assert (gone.block_hashes, gone.medium, gone.group_idx) == ([told(A), told(B)], MEDIUM_CPU, 1)


def test_names_are_told_as_the_engines_own_hashes() -> None:
    events = hearing(mask=MASK)
    parents = bytes(32) + masked(A, MASK)
    events.hear(stored(hashes=masked(A + B, MASK), parents=parents), 2)
    events.hear(removed(hashes=masked(A, MASK)), 3)
    first, second, third = take(events)
    assert (first.block_hashes, first.parent_block_hash) == ([told(A)], None)
    assert (second.block_hashes, second.parent_block_hash) == ([told(B)], told(A))
    assert third.block_hashes == [told(A)]


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(stored(OTHERS), id="of another identity"),
        pytest.param(removed(OTHERS), id="removed of another identity"),
        pytest.param(stored(99), id="of a namespace that nobody opened"),
        pytest.param(stored(group=1), id="of a group that there is not"),
    ],
)
def test_what_is_no_block_of_ours_is_not_told(event: Stored | Removed) -> None:
    events = hearing()
    events.hear(event, 2)
    assert take(events) == []


@pytest.mark.parametrize(
    ("medium", "place"),
    [(Medium.DISK, ("STORAGE", "LOCAL", "disk")), (Medium.REMOTE, ("STORAGE", "REMOTE", "remote"))],
)
def test_what_slower_tiers_have_is_told_by_their_medium(medium: Medium, place: tuple[str, str, str]) -> None:
    events = hearing()
    events.note_tokens(saving(range(16)), 0, range(2), A + B)
    events.hear(stored(), 2)
    events.hear(stored(medium=medium), 3)
    # The tier still has a block that memory loses, and an inventory is of memory alone.
    events.hear(removed(), 4)
    for mark in (InventoryBegun(), InventoryEnded()):
        events.hear(mark, 0)
    events.hear(removed(medium=medium, hashes=A), 5)
    in_memory, below, gone, gone_below = take(events)
    assert (in_memory.medium, gone.medium) == (MEDIUM_CPU, MEDIUM_CPU)
    for one in (below, gone_below):
        assert (one.medium, one.locality, one.ownership) == place
    assert (below.block_hashes, below.token_ids) == ([told(A), told(B)], list(range(16)))
    assert gone_below.block_hashes == [told(A)]


def test_after_a_loss_nothing_is_known_of_slower_tiers() -> None:
    """No inventory tells what they have."""
    events = hearing()
    events.hear(stored(medium=Medium.DISK, hashes=A, parents=b""), 2)
    events.hear(stored(hashes=A, parents=b""), 2)
    take(events)
    events.hear(EventsLost(count=1), 3)
    [gone] = take(events)
    assert (type(gone), gone.medium, gone.block_hashes) == (BlockRemoved, "STORAGE", [told(A)])
    events.hear(stored(medium=Medium.DISK, hashes=A, parents=b""), 4)
    [again] = take(events)
    assert again.medium == "STORAGE"


def test_a_server_that_came_later_counts_anew() -> None:
    events = hearing()
    events.hear(NamespaceOpened(name_space=OURS, fingerprint=b"g" * 32), 0)
    events.hear(NamespaceOpened(name_space=OTHERS, fingerprint=b"f" * 32), 1)
    events.hear(stored(OURS, hashes=A, parents=b""), 2)
    events.hear(stored(OTHERS, hashes=B, parents=b""), 3)
    assert [one.block_hashes for one in take(events)] == [[told(B)]]


def test_of_events_beyond_the_bound_none_counts_before_the_next_inventory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "MAX_EVENTS", 3)
    asked: list[int] = []
    events = hearing()
    events.start(lambda: bool(asked.append(1)) or True)
    events.close()
    for name in (A, B, C, D):
        events.hear(stored(hashes=name, parents=b""), 2)
    events.hear(InventoryEnded(), 0)
    assert take(events) == []
    assert asked
    events.hear(InventoryBegun(), 0)
    events.hear(stored(hashes=B, parents=b""), 0)
    assert [one.block_hashes for one in take(events)] == [[told(B)]]


def test_without_an_inventory_it_goes_on_with_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "MAX_EVENTS", 2)
    events = hearing()
    for name in (A, B, C):
        events.hear(stored(hashes=name, parents=b""), 2)
    assert take(events) == []
    events.hear(stored(hashes=D, parents=b""), 2)
    assert [one.block_hashes for one in take(events)] == [[told(D)]]


def test_what_nobody_takes_is_not_made_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts blocks: a page of an inventory has thousands."""
    monkeypatch.setattr(cache_events, "MADE_BLOCKS", 2)
    events = hearing()
    for names in (A + B, C + D):
        events.hear(stored(hashes=names, parents=b""), 2)
        events.make()
    assert [one.block_hashes for one in events.take()] == [[told(A)], [told(B)]]
    assert [one.block_hashes for one in take(events)] == [[told(C)], [told(D)]]


def test_what_was_lost_is_asked_for_when_there_is_room_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for bound in ("MADE_BLOCKS", "MAX_EVENTS"):
        monkeypatch.setattr(cache_events, bound, 1)
    asked: list[int] = []
    events = hearing()
    events.start(lambda: bool(asked.append(1)) or True)
    events.close()
    events.hear(stored(), 2)
    events.make()
    for _ in range(2):
        events.hear(stored(hashes=C, parents=b""), 3)
    events.make()
    assert not asked
    assert len(list(events.take())) == 2
    events.make()
    assert asked


def test_nothing_is_told_again_before_the_last_of_it_was_taken() -> None:
    events = hearing()
    events.hear(stored(), 2)
    assert not events.tell_again()
    events.make()
    assert not events.tell_again()
    list(events.take())
    assert events.tell_again()


def test_no_inventory_is_begun_anew_for_telling_all_again() -> None:
    events = hearing()
    events.hear(InventoryBegun(), 0)
    take(events)
    assert not events.tell_again()
    events.hear(InventoryEnded(), 0)
    take(events)
    assert events.tell_again()


def test_a_step_tells_a_part_of_a_large_inventory_and_the_next_ones_the_rest() -> None:
    names = [at.to_bytes(32, "little") for at in range(10_000)]
    events = hearing()
    events.note_tokens(saving(range(8 * 300)), 0, range(300), b"".join(names[:300]))
    for first in range(0, 10_000, 4096):
        events.hear(stored(hashes=b"".join(names[first : first + 4096]), parents=b""), 0)
    steps = [take(events) for _ in range(6)]
    blocks = [[name for event in step for name in event.block_hashes] for step in steps]
    assert [name for step in blocks for name in step] == [told(name) for name in names]
    assert max(len(step) for step in blocks) < 2048 + 256
    assert steps[-1] == []


def test_blocks_beyond_the_bound_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_blocks, "MAX_TOLD", 2)
    events = hearing()
    events.hear(stored(hashes=A + B + C, parents=b""), 2)
    assert [one.block_hashes for one in take(events)] == [[told(A)], [told(B)]]
    events.hear(removed(hashes=A + C), 2)
    events.hear(stored(hashes=D, parents=b""), 2)
    assert [one.block_hashes for one in take(events)] == [[told(A)], [told(D)]]


def test_an_inventory_tells_what_is_new_and_what_has_gone() -> None:
    events = hearing()
    events.hear(stored(hashes=A + B + C, parents=b""), 2)
    take(events)
    events.hear(InventoryBegun(), 0)
    # Listed, or told meanwhile, it is there.
    events.hear(stored(hashes=B + D, parents=bytes(32) + B), 0)
    events.hear(removed(hashes=D), 3)
    events.hear(stored(hashes=C, parents=B), 4)
    events.hear(InventoryEnded(), 0)
    first, second, third = take(events)
    assert (type(first), first.block_hashes) == (BlockStored, [told(D)])
    assert (type(second), second.block_hashes) == (BlockRemoved, [told(D)])
    assert (type(third), third.block_hashes) == (BlockRemoved, [told(A)])


def test_an_inventory_that_begins_anew_forgets_none() -> None:
    events = hearing()
    events.hear(stored(hashes=A + B, parents=b""), 2)
    take(events)
    for event in (InventoryBegun(), stored(hashes=A, parents=b""), InventoryBegun(), stored(hashes=B, parents=b"")):
        events.hear(event, 0)
    assert take(events) == []
    events.hear(InventoryEnded(), 0)
    [gone] = take(events)
    assert gone.block_hashes == [told(A)]


def test_many_that_have_gone_are_told_in_parts() -> None:
    names = [bytes([at]) * 32 for at in range(150)]
    events = hearing()
    events.hear(stored(hashes=b"".join(names), parents=b""), 2)
    take(events)
    events.hear(InventoryBegun(), 0)
    events.hear(InventoryEnded(), 0)
    gone = take(events)
    assert [len(one.block_hashes) for one in gone] == [64, 64, 22]
    assert sorted(name for one in gone for name in one.block_hashes) == sorted(told(name) for name in names)


def test_all_can_be_told_again_by_an_inventory() -> None:
    events = hearing()
    for is_told in (True, False):
        for event in (InventoryBegun(), stored(hashes=A + C, parents=bytes(32) + C), InventoryEnded()):
            events.hear(event, 0)
        assert [one.block_hashes for one in take(events)] == ([[told(A)], [told(C)]] if is_told else [])
    events.tell_again()
    for event in (InventoryBegun(), stored(hashes=A, parents=bytes(32)), InventoryEnded()):
        events.hear(event, 0)
    again, gone = take(events)
    assert (type(again), again.block_hashes) == (BlockStored, [told(A)])
    assert (type(gone), gone.block_hashes) == (BlockRemoved, [told(C)])


def test_all_is_asked_for_again_now_and_then() -> None:
    events = CacheEvents(b"f" * 32, hearing_groups(), again_s=0.001)
    asked = threading.Event()
    events.start(lambda: bool(asked.set()) or True)
    try:
        assert asked.wait(60)
    finally:
        events.close()


def test_a_listed_block_whose_beginning_is_not_known_has_no_parent() -> None:
    events = hearing(mask=MASK)
    events.hear(stored(hashes=masked(B, MASK), parents=masked(B, MASK)), 2)
    [only] = take(events)
    assert (only.block_hashes, only.parent_block_hash) == ([told(B)], None)


def test_of_a_model_with_windows_what_can_be_loaded_is_told_of_full_attention() -> None:
    events = hearing(group_facts(3, ReuseRule.WINDOW, window=6))
    events.note_tokens(saving(range(32)), 0, range(4), A + B + C + D)
    events.note_tokens(saving(range(32)), 1, range(8), A * 8)
    events.hear(stored(hashes=A + B + C, parents=bytes(32) + A + B), 2)
    assert take(events) == []
    # Blocks of 4 tokens, of which every other one ends with a block of full attention.
    events.hear(stored(group=1, hashes=D + B, parents=bytes(32) + B), 3)
    [run] = take(events)
    assert (run.block_hashes, run.group_idx, run.kv_cache_spec_kind) == ([told(A), told(B)], 1, "full_attention")
    assert run.token_ids == list(range(16))
    events.hear(removed(group=1, hashes=B), 4)
    [gone] = take(events)
    assert (set(gone.block_hashes), gone.group_idx) == ({told(A), told(B)}, 1)


def test_an_inventory_of_a_model_with_states_tells_what_can_be_loaded_still() -> None:
    events = hearing(group_facts(3, ReuseRule.EXACT_BOUNDARY, block_size=8))
    for _ in range(2):
        events.hear(InventoryBegun(), 0)
        events.hear(stored(group=1, hashes=B, parents=B), 0)
        events.hear(stored(hashes=A + B, parents=bytes(32) + A), 0)
        events.hear(InventoryEnded(), 0)
    assert [one.block_hashes for one in take(events)] == [[told(A)], [told(B)]]
    events.hear(InventoryBegun(), 0)
    events.hear(stored(hashes=A + B, parents=bytes(32) + A), 0)
    events.hear(InventoryEnded(), 0)
    [gone] = take(events)
    assert set(gone.block_hashes) == {told(A), told(B)}


def test_blocks_of_others_are_told_once_more_when_their_tokens_are_known() -> None:
    events = hearing()
    events.hear(stored(hashes=A + B + C, parents=bytes(32) + A + B), 2)
    assert [one.token_ids for one in take(events)] == [[]] * 3
    found = saving(range(40), session_id="mine")
    found.chain.names = lambda group, positions: (A + B + C + D)[positions.start * 32 : positions.stop * 32]
    events.note_found(found, 20)
    [run] = take(events)
    assert (run.block_hashes, run.parent_block_hash, run.session_id) == ([told(A), told(B)], None, "mine")
    assert run.token_ids == list(range(16))
    events.note_found(found, 20)
    assert take(events) == []
    events.note_found(found, 32)
    [last] = take(events)
    assert (last.block_hashes, last.parent_block_hash) == ([told(C)], told(B))
    # A block that comes later is told at once, placed behind its parent.
    events.hear(stored(hashes=D, parents=C), 3)
    [new] = take(events)
    assert new.token_ids == list(range(24, 32))


def test_what_was_found_of_a_request_is_noted_once_however_often_it_is_asked_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_compat, "wants_events", lambda config: True)
    engine = ScriptedEngine(*DENSE)
    engine.parts.events.close()
    engine.serve("first", range(30))
    engine.report(engine.step())
    noted: list[int] = []
    monkeypatch.setattr(engine.parts.events, "note_found", lambda tracked, tokens: noted.append(tokens))
    request = engine.arrive("waits", range(30))
    for _ in range(3):
        assert engine.connector.get_num_new_matched_tokens(request, 0)[0]
    size = engine.parts.groups.rules[0].block_size
    assert noted == [len(request.block_hashes) * size]
    # Under another mask its blocks have other names.
    engine.connector.reset_cache()
    engine.connector.get_num_new_matched_tokens(request, size)
    assert noted[1:] == [size]


def test_of_a_prompt_that_is_known_already_the_rest_is_noted() -> None:
    names = [(1000 + at).to_bytes(32, "little") for at in range(600)]
    events = hearing()
    for known in (300, 600):
        events.note_tokens(saving(range(8 * 600)), 0, range(known), b"".join(names[:known]))
        events.make()
    events.hear(stored(hashes=b"".join(names), parents=bytes(32) + b"".join(names[:-1])), 2)
    assert [token for run in take(events) for token in run.token_ids] == list(range(8 * 600))


def test_long_prompts_are_noted_in_parts() -> None:
    names = [(1000 + at).to_bytes(32, "little") for at in range(600)]
    events = hearing()
    events.note_tokens(saving(range(8 * 600), before=D), 0, range(600), b"".join(names))
    events.hear(stored(hashes=b"".join(names), parents=bytes(32) + b"".join(names[:-1])), 2)
    runs = take(events)
    assert [len(run.block_hashes) for run in runs] == [256, 256, 88]
    assert [run.parent_block_hash for run in runs] == [None, told(names[255]), told(names[511])]
    assert [token for run in runs for token in run.token_ids] == list(range(8 * 600))


def test_what_is_told_again_has_its_tokens() -> None:
    """A block that left and came again, by another engine say."""
    events = hearing()
    events.note_tokens(saving(range(16)), 0, range(2), A + B)
    for _ in range(2):
        events.hear(stored(), 2)
        [run] = take(events)
        assert run.token_ids == list(range(16))
        events.hear(removed(), 3)
        assert len(take(events)) == 1


@pytest.mark.parametrize("is_reset", [False, True])
def test_what_an_engine_saves_is_told_as_its_own_hashes_before_and_after_a_reset(
    monkeypatch: pytest.MonkeyPatch, is_reset: bool
) -> None:
    monkeypatch.setattr(vllm_compat, "wants_events", lambda config: True)
    engine = ScriptedEngine(*DENSE)
    # Here this thread makes them.
    engine.parts.events.close()
    if is_reset:
        engine.connector.reset_cache()
    hashes = list(engine.arrive("a", range(30)).block_hashes)
    engine.admit(engine.requests["a"])
    engine.report(engine.step())
    engine.parts.events.hear(NamespaceOpened(name_space=OURS, fingerprint=b"f" * 32), 0)
    names, parents = (b"".join(getattr(one, which) for one in engine.cache.published) for which in ("name", "parent"))
    engine.parts.events.hear(stored(hashes=names, parents=parents), 1)
    engine.parts.events.make()
    heard: list[Any] = list(engine.connector.take_events())
    [run] = heard
    assert (run.block_hashes, run.parent_block_hash) == ([told(name) for name in hashes], None)
    assert run.token_ids == list(range(len(hashes) * run.block_size))
    # A router that hashes the tokens itself gets the same names.
    parent = None
    for at, name in enumerate(hashes):
        tokens = run.token_ids[at * run.block_size : (at + 1) * run.block_size]
        parent = hash_block_tokens(sha256, parent, tokens)
        assert parent == name
    # Told again, by another engine say, they are nothing new.
    engine.parts.events.hear(stored(hashes=names, parents=parents), 2)
    engine.parts.events.make()
    assert list(engine.connector.take_events()) == []


def test_nothing_is_heard_for_an_engine_that_tells_nobody() -> None:
    engine = ScriptedEngine(*DENSE)
    assert engine.parts.events is None
    assert list(engine.connector.take_events()) == []

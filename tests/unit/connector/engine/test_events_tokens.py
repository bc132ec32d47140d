"""Blocks that an engine saved are told with what they are made of, on a thread that makes the events."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved
from vllm.lora.request import LoRARequest

from kvoffload.client import InventoryBegun, InventoryEnded
from kvoffload.connector.engine import events as cache_events
from kvoffload.connector.engine.events import CacheEvents
from kvoffload.connector.engine.saved_tokens import MAX_BLOCKS
from kvoffload.protocol import Medium, NamespaceOpened
from tests.kit.connector.told_events import (
    CONTENT,
    KINDS,
    MASK,
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


def test_blocks_that_follow_each_other_are_told_in_one_event_with_their_tokens() -> None:
    events = hearing()
    events.note_tokens(saving(range(100, 140), before=D), 0, range(1, 3), A + B)
    events.note_tokens(saving(range(16)), 0, range(1), C)
    events.hear(stored(hashes=D, parents=b""), 2)
    events.hear(stored(hashes=A + B + C, parents=D + A + bytes(32)), 2)
    _, first, second = take(events)
    assert (first.block_hashes, first.parent_block_hash) == ([told(A), told(B)], told(D))
    assert (first.token_ids, first.block_size) == (list(range(108, 124)), 8)
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == ([told(C)], None, list(range(8)))


def test_what_goes_on_from_a_block_that_was_not_told_is_told_after_it() -> None:
    events = hearing()
    for position, name in enumerate((A, B, C)):
        events.note_tokens(saving(range(32), before=(A, B, C)[position - 1]), 0, range(position, position + 1), name)
    on_disk = stored(hashes=C, parents=B, medium=Medium.DISK)
    for event in (stored(hashes=B + D, parents=A + B), on_disk):
        events.hear(event, 2)
    assert take(events) == [], "a router drops what goes on from a block that it does not know"
    events.hear(removed(hashes=D), 3)
    events.hear(stored(hashes=A, parents=bytes(32)), 4)
    assert [(one.block_hashes, one.medium) for one in take(events)] == [
        ([told(A)], MEDIUM_CPU),
        ([told(B)], MEDIUM_CPU),
        ([told(C)], "STORAGE"),
    ]
    events.hear(removed(hashes=A + B), 5)
    # The server knows no more what was before it, but its request did.
    events.hear(stored(hashes=B, parents=B), 6)
    assert [type(one) for one in take(events)] == [BlockRemoved]
    # A block that came back before the inventory names it is held until the block before it is told.
    events.hear(InventoryBegun(), 0)
    events.hear(stored(hashes=B + A, parents=A + bytes(32)), 0)
    events.hear(InventoryEnded(), 0)
    assert [one.block_hashes for one in take(events)] == [[told(A)], [told(B)]]


def test_a_block_of_others_between_is_told_by_its_name() -> None:
    events = hearing()
    events.note_tokens(saving(range(24)), 0, range(3), A + B + C)
    events.hear(stored(hashes=A + D + C, parents=bytes(32) + A + D), 2)
    assert [one.token_ids for one in take(events)] == [list(range(8)), [], list(range(16, 24))]


def test_blocks_of_a_window_are_told_with_their_tokens_and_the_block_before_them() -> None:
    events = hearing_windows()
    events.note_tokens(saving(range(24), before=D), 0, range(3, 5), A + B)
    events.hear(stored(parents=A + B), 2)
    [run] = take(events)
    assert (run.block_hashes, run.parent_block_hash) == ([told(A), told(B)], told(D))
    assert (run.token_ids, run.kv_cache_spec_sliding_window) == (list(range(12, 20)), 6)


def test_a_salt_is_a_key_of_the_first_block() -> None:
    events = hearing()
    events.note_tokens(saving(range(24), cache_salt="s", session_id="mine"), 0, range(2), A + B)
    events.hear(stored(), 2)
    [run] = take(events)
    assert (run.extra_keys, run.token_ids, run.session_id) == ([("s",), None], list(range(16)), "mine")


def adapted(positions: range, names: bytes) -> tuple[CacheEvents, bytes]:
    """Blocks of an adapter are stored; as what."""
    events = hearing(mask=MASK)
    both = bytes(one ^ other for one, other in zip(MASK, CONTENT, strict=True))
    adapter = LoRARequest("poet", 5, "/poet")
    events.note_tokens(saving(range(24), mask=both, lora_request=adapter), 0, positions, masked(names, both))
    events.hear(stored(hashes=masked(names, both), parents=bytes(32) + masked(names[:-32], both)), 2)
    return events, both


def test_blocks_of_an_adapter_come_and_go_under_the_engines_own_hashes() -> None:
    events, mask = adapted(range(2), A + B)
    [run] = take(events)
    assert (run.block_hashes, run.parent_block_hash) == ([told(A), told(B)], None)
    assert (run.lora_id, run.lora_name, run.extra_keys) == (5, "poet", [("poet",), ("poet",)])
    events.hear(stored(hashes=masked(C, MASK), parents=b""), 2)
    take(events)
    events.hear(removed(hashes=masked(B, mask) + masked(C, MASK) + masked(A, mask)), 3)
    [gone] = take(events)
    assert gone.block_hashes == [told(B), told(C), told(A)]


def test_after_a_reset_of_weights_nothing_of_the_old_ones_is_there() -> None:
    masks, asked = [MASK], list[int]()
    events = CacheEvents(b"f" * 32, hearing_groups(), kinds=KINDS, find_mask=lambda: masks[-1])
    events.start(lambda: bool(asked.append(1)) or True)
    events.close()
    events.hear(NamespaceOpened(name_space=OURS, fingerprint=b"f" * 32), 0)
    old = stored(hashes=masked(A + B, MASK), parents=bytes(32) + masked(A, MASK))
    events.note_tokens(saving(range(16), mask=MASK), 0, range(2), masked(A + B, MASK))
    for event in (old, replace(old, medium=Medium.DISK)):
        events.hear(event, 1)
    assert [one.block_hashes for one in take(events)] == [[told(A), told(B)]] * 2
    events.note_tokens(saving(range(8), mask=MASK), 0, range(1), masked(C, MASK))
    masks.append(CONTENT)
    events.note_tokens(saving(range(8), mask=CONTENT), 0, range(1), masked(D, CONTENT))
    in_memory, below = take(events)
    for gone, medium in ((in_memory, MEDIUM_CPU), (below, "STORAGE")):
        assert (type(gone), gone.medium) == (BlockRemoved, medium)
        assert set(gone.block_hashes) == {told(A), told(B)}, "the hashes that they were told as"
    assert asked
    # The server has them all still: what is there of the new weights is told, and of the old ones no hash of a prompt.
    for event in (InventoryBegun(), old, stored(hashes=masked(C, MASK) + masked(D, CONTENT), parents=b"")):
        events.hear(event, 0)
    *others, new = take(events)
    assert all(one.token_ids == [] for one in others)
    assert not {told(name) for name in (A, B, C)} & {name for one in others for name in one.block_hashes}
    assert (new.block_hashes, new.token_ids) == ([told(D)], list(range(8)))


def test_what_cannot_be_remembered_of_adapters_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BLOCKS == cache_events.MAX_BLOCKS
    monkeypatch.setattr(cache_events, "MAX_BLOCKS", 1)
    events, _ = adapted(range(2), A + B)
    run, gone = take(events)
    assert run.block_hashes == [told(A), told(B)]
    assert (gone.block_hashes, gone.group_idx, gone.medium) == ([told(A)], 1, MEDIUM_CPU)


def test_a_thread_makes_them_while_others_go_on() -> None:
    events = hearing()
    events.start(lambda: False)
    try:
        events.hear(stored(hashes=A, parents=b""), 2)
        made: list[Any] = []
        while not made:
            made += events.take()
            time.sleep(0.001)
        assert made[0].block_hashes == [told(A)]
    finally:
        events.close()


def test_what_is_not_made_when_it_is_closed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "CLOSE_S", 0.01)
    begun, went_on = threading.Event(), threading.Event()
    pieces: list[slice] = []

    class SlowTokens(list[int]):
        def __getitem__(self, at: Any) -> Any:
            pieces.append(at)
            begun.set()
            assert went_on.wait(60)
            return super().__getitem__(at)

    names = b"".join(at.to_bytes(32, "little") for at in range(4096))
    prompt = saving(range(0))
    prompt.request.all_token_ids = SlowTokens(range(8 * 4096))
    events = hearing()
    events.note_tokens(prompt, 0, range(4096), names)
    events.hear(stored(hashes=names, parents=b""), 2)
    events.start(lambda: False)
    assert begun.wait(60)
    events.close()
    [thread] = [one for one in threading.enumerate() if one.name == "kvoffload-events"]
    went_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(pieces) == 1
    assert list(events.take()) == []


def test_an_inventory_that_begins_anew_in_the_midst_of_many_blocks_forgets_none() -> None:
    names = [at.to_bytes(32, "little") for at in range(1000)]
    events = hearing()
    events.hear(stored(hashes=b"".join(names), parents=b""), 2)
    assert len(take(events)) == 1000
    for listed in (names[:600], names[400:]):
        events.hear(InventoryBegun(), 0)
        events.hear(stored(hashes=b"".join(listed), parents=b""), 0)
    assert take(events) == []
    events.hear(InventoryEnded(), 0)
    assert sorted(name for one in take(events) for name in one.block_hashes) == sorted(map(told, names[:400]))


def test_one_that_cannot_be_made_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    events = hearing()
    broken = saving(range(24), cache_salt="s")
    del broken.request.mm_features
    events.note_tokens(broken, 0, range(1), A)
    events.start(lambda: False)
    try:
        made: list[Any] = []
        events.hear(stored(hashes=A, parents=b""), 2)
        while not caplog.records:
            time.sleep(0.001)
        events.hear(stored(hashes=B, parents=b""), 2)
        while not any(one.block_hashes == [told(B)] for one in made):
            made += events.take()
            time.sleep(0.001)
    finally:
        events.close()
    assert len(caplog.records) == 1


def test_a_tenants_tokens_are_not_told() -> None:
    events, tracked = hearing(), saving(range(24))
    tracked.settings.tenant = "a"
    events.note_tokens(tracked, 0, range(2), A + B)
    events.hear(stored(), 2)
    assert [one.token_ids for one in take(events)] == [[], []]

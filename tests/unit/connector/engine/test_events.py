"""What a server tells of its blocks, as vLLM's routers hear it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, maybe_convert_block_hash

from kvoffload.connector.block_chain import NO_MASK
from kvoffload.connector.engine import events as cache_events
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.events import CacheEvents
from kvoffload.connector.engine.saved_tokens import MAX_BLOCKS
from kvoffload.connector.engine.vllm_compat import GroupKind
from kvoffload.connector.group_table import GroupTable
from kvoffload.connector.step_plan import GroupFacts
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Medium, NamespaceOpened, Removed, Stored
from tests.kit.connector.facts import group_facts
from tests.kit.connector.saving import DENSE
from tests.kit.connector.scripted import ScriptedEngine

OURS, OTHERS = 7, 8
A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))
MASK = bytes(range(32))
CONTENT = bytes(range(100, 132))
KINDS = [GroupKind("other", None), GroupKind("full_attention", None), GroupKind("other", None), GroupKind("window", 6)]


def told(name: bytes) -> Any:
    """A hash as vLLM's events say it."""
    return maybe_convert_block_hash(BlockHash(name))


def masked(names: bytes, mask: bytes) -> bytes:
    return bytes(byte ^ mask[at % 32] for at, byte in enumerate(names))


def hearing(*more: GroupFacts, mask: bytes = NO_MASK) -> CacheEvents:
    groups = [group_facts(1, block_size=8), group_facts(3, ReuseRule.WINDOW, window=6), *more]
    groups.sort(key=lambda group: (group.index, group.stage))
    return hearing_of(GroupTable(groups, hash_block_size=4, alignment=8), mask)


def hearing_of(groups: GroupTable, mask: bytes = NO_MASK) -> CacheEvents:
    events = CacheEvents(b"f" * 32, groups, kinds=KINDS, find_mask=lambda: mask)
    events.hear(NamespaceOpened(name_space=OURS, fingerprint=b"f" * 32), 0)
    events.hear(NamespaceOpened(name_space=OTHERS, fingerprint=b"g" * 32), 1)
    return events


def stored(name_space: int = OURS, **changes: Any) -> Stored:
    given = {"medium": Medium.MEMORY, "group": 0, "hashes": A + B, "parents": bytes(32) + A}
    return Stored(name_space=name_space, **{**given, **changes})


def removed(name_space: int = OURS, **changes: Any) -> Removed:
    return Removed(name_space=name_space, **{"medium": Medium.MEMORY, "group": 1, "hashes": A + B, **changes})


def take(events: CacheEvents) -> list[Any]:
    events.make()
    return list(events.take())


@pytest.mark.parametrize(("group", "index", "block_size"), [(0, 1, 8), (1, 3, 4)])
def test_a_stored_block_is_told_with_the_engines_group_its_medium_and_its_parent(
    group: int, index: int, block_size: int
) -> None:
    events = hearing()
    events.hear(stored(group=group), 2)
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
    """The second stage has no window."""
    events = hearing(replace(group_facts(1, block_size=8), stage=1))
    for group in range(3):
        events.hear(stored(group=group, hashes=A, parents=bytes(32)), 2)
        events.hear(removed(group=group, hashes=A), 3)
    told_events = take(events)
    assert [one.group_idx for one in told_events] == [1, 1, 3, 3]
    assert [type(one) for one in told_events] == [BlockStored, BlockRemoved] * 2
    assert told_events[0].block_size == 8


def test_blocks_without_parents_have_none() -> None:
    events = hearing()
    events.hear(stored(parents=b""), 2)
    assert [one.parent_block_hash for one in take(events)] == [None, None]


def test_removed_blocks_are_told_in_their_order_with_what_was_stored() -> None:
    events = hearing()
    events.hear(stored(hashes=C, parents=bytes(32)), 2)
    events.hear(removed(), 3)
    first, second = take(events)
    assert first.block_hashes == [told(C)]
    assert isinstance(second, BlockRemoved)
    assert (second.block_hashes, second.medium, second.group_idx) == ([told(A), told(B)], MEDIUM_CPU, 3)


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
        pytest.param(stored(medium=Medium.DISK), id="on disk"),
        pytest.param(removed(medium=Medium.REMOTE), id="removed elsewhere"),
        pytest.param(stored(group=2), id="of a group that there is not"),
    ],
)
def test_what_is_no_block_of_ours_in_memory_is_not_told(event: Stored | Removed) -> None:
    events = hearing()
    events.hear(event, 2)
    assert take(events) == []


def test_a_server_that_came_later_counts_anew() -> None:
    events = hearing()
    events.hear(NamespaceOpened(name_space=OURS, fingerprint=b"g" * 32), 0)
    events.hear(NamespaceOpened(name_space=OTHERS, fingerprint=b"f" * 32), 1)
    events.hear(stored(OURS, hashes=A, parents=b""), 2)
    events.hear(stored(OTHERS, hashes=B, parents=b""), 3)
    assert [one.block_hashes for one in take(events)] == [[told(B)]]


def test_so_many_wait_and_the_oldest_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "MAX_EVENTS", 2)
    events = hearing()
    for name in (A, B, C):
        events.hear(stored(hashes=name, parents=b""), 2)
    assert [one.block_hashes for one in take(events)] == [[told(B)], [told(C)]]


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
    # Told again, by another engine say, they are names alone.
    engine.parts.events.hear(stored(hashes=names, parents=parents), 2)
    engine.parts.events.make()
    heard = list(engine.connector.take_events())
    assert [one.block_hashes for one in heard] == [[told(name)] for name in hashes]
    assert [one.parent_block_hash for one in heard] == [None, *map(told, hashes[:-1])]
    assert [one.token_ids for one in heard] == [[]] * len(hashes)


def test_nothing_is_heard_for_an_engine_that_tells_nobody() -> None:
    engine = ScriptedEngine(*DENSE)
    assert engine.parts.events is None
    assert list(engine.connector.take_events()) == []


def saving(tokens: range, *, mask: bytes = NO_MASK, before: bytes = b"", **changes: Any) -> Any:
    """A request whose blocks are saved. `before`: the name of the block before them."""
    given = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None, "session_id": None}
    given |= {"all_token_ids": list(tokens), **changes}
    chain = SimpleNamespace(mask=mask, before=lambda group, position: before if position else bytes(32))
    return SimpleNamespace(request=SimpleNamespace(**given), terms=SimpleNamespace(tenant=""), chain=chain)


def test_blocks_that_follow_each_other_are_told_in_one_event_with_their_tokens() -> None:
    events = hearing()
    events.note_saved(saving(range(100, 140), before=D), 0, range(1, 3), A + B)
    events.note_saved(saving(range(16)), 0, range(1), C)
    events.hear(stored(hashes=A + B + C, parents=D + A + bytes(32)), 2)
    first, second = take(events)
    assert (first.block_hashes, first.parent_block_hash) == ([told(A), told(B)], told(D))
    assert (first.token_ids, first.block_size) == (list(range(108, 124)), 8)
    assert (second.block_hashes, second.parent_block_hash, second.token_ids) == ([told(C)], None, list(range(8)))


def test_a_block_of_others_between_is_told_by_its_name() -> None:
    events = hearing()
    events.note_saved(saving(range(24)), 0, range(3), A + B + C)
    events.hear(stored(hashes=A + D + C, parents=bytes(32) + A + D), 2)
    assert [one.token_ids for one in take(events)] == [list(range(8)), [], list(range(16, 24))]


def test_blocks_of_a_window_are_told_with_their_tokens_and_the_block_before_them() -> None:
    events = hearing()
    events.note_saved(saving(range(24), before=D), 1, range(3, 5), A + B)
    events.hear(stored(group=1, parents=A + B), 2)
    [run] = take(events)
    assert (run.block_hashes, run.parent_block_hash) == ([told(A), told(B)], told(D))
    assert (run.token_ids, run.kv_cache_spec_sliding_window) == (list(range(12, 20)), 6)


def test_a_salt_is_a_key_of_the_first_block() -> None:
    events = hearing()
    events.note_saved(saving(range(24), cache_salt="s", session_id="mine"), 0, range(2), A + B)
    events.hear(stored(), 2)
    [run] = take(events)
    assert (run.extra_keys, run.token_ids, run.session_id) == ([("s",), None], list(range(16)), "mine")


def adapted(positions: range, names: bytes) -> tuple[CacheEvents, bytes]:
    """Blocks of an adapter are stored; as what."""
    events = hearing(mask=MASK)
    both = bytes(one ^ other for one, other in zip(MASK, CONTENT, strict=True))
    adapter = LoRARequest("poet", 5, "/poet")
    events.note_saved(saving(range(24), mask=both, lora_request=adapter), 0, positions, masked(names, both))
    events.hear(stored(hashes=masked(names, both), parents=masked(bytes(32) + names[:-32], both)), 2)
    return events, both


def test_blocks_of_an_adapter_come_and_go_under_the_engines_own_hashes() -> None:
    events, mask = adapted(range(2), A + B)
    [run] = take(events)
    assert (run.block_hashes, run.parent_block_hash) == ([told(A), told(B)], None)
    assert (run.lora_id, run.lora_name, run.extra_keys) == (5, "poet", [("poet",), ("poet",)])
    events.hear(removed(group=0, hashes=masked(B, mask) + masked(C, MASK) + masked(A, mask)), 3)
    [gone] = take(events)
    assert gone.block_hashes == [told(B), told(C), told(A)]


def test_what_cannot_be_remembered_of_adapters_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_BLOCKS == cache_events.MAX_BLOCKS
    monkeypatch.setattr(cache_events, "MAX_BLOCKS", 1)
    events, _ = adapted(range(2), A + B)
    run, gone = take(events)
    assert run.block_hashes == [told(A), told(B)]
    assert (gone.block_hashes, gone.group_idx, gone.medium) == ([told(A)], 1, MEDIUM_CPU)


def test_a_thread_makes_them_while_others_go_on() -> None:
    events = hearing()
    events.start()
    try:
        events.hear(stored(hashes=A, parents=b""), 2)
        made: list[Any] = []
        while not made:
            made += events.take()
            time.sleep(0.001)
        assert made[0].block_hashes == [told(A)]
    finally:
        events.close()


def test_one_that_cannot_be_made_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    events = hearing()
    broken = saving(range(24), cache_salt="s")
    del broken.request.mm_features
    events.note_saved(broken, 0, range(1), A)
    events.start()
    try:
        for name in (A, B, C):
            events.hear(stored(hashes=name, parents=b""), 2)
            made: list[Any] = []
            while not made and not (name == A and caplog.records):
                made += events.take()
                time.sleep(0.001)
        assert made[0].block_hashes == [told(C)]
    finally:
        events.close()
    assert len(caplog.records) == 1


def test_a_tenants_tokens_are_not_told() -> None:
    events, tracked = hearing(), saving(range(24))
    tracked.terms.tenant = "a"
    events.note_saved(tracked, 0, range(2), A + B)
    events.hear(stored(), 2)
    assert [one.token_ids for one in take(events)] == [[], []]

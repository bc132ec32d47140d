"""Server messages that events are made of, and the events that were made of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvoffload.connector.common.block_chain import NO_MASK
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.step_plan import GroupFacts
from kvoffload.connector.engine.events import CacheEvents
from kvoffload.connector.engine.vllm_compat import GroupKind
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Medium, NamespaceOpened, Removed, Stored
from tests.kit.connector.facts import group_facts

OURS, OTHERS = 7, 8
A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))
MASK = bytes(range(32))
CONTENT = bytes(range(100, 132))
KINDS = [GroupKind("other", None), GroupKind("full_attention", None), GroupKind("other", None), GroupKind("window", 6)]


def masked(names: bytes, mask: bytes) -> bytes:
    return bytes(byte ^ mask[at % 32] for at, byte in enumerate(names))


def hearing(*more: GroupFacts, mask: bytes = NO_MASK) -> CacheEvents:
    """Makes the events of a model with full attention and more groups."""
    return hearing_of(hearing_groups(*more), mask)


def hearing_groups(*more: GroupFacts) -> GroupTable:
    groups = [group_facts(1, block_size=8), *more]
    groups.sort(key=lambda group: (group.index, group.stage))
    return GroupTable(groups, hash_block_size=4, alignment=8)


def hearing_windows(mask: bytes = NO_MASK) -> CacheEvents:
    """Makes the events of a model that has windows alone."""
    groups = [group_facts(3, ReuseRule.WINDOW, window=6)]
    return hearing_of(GroupTable(groups, hash_block_size=4, alignment=4), mask)


def hearing_of(groups: GroupTable, mask: bytes = NO_MASK) -> CacheEvents:
    events = CacheEvents(b"f" * 32, groups, kinds=KINDS, find_mask=lambda: mask)
    events.hear(NamespaceOpened(name_space=OURS, fingerprint=b"f" * 32), 0)
    events.hear(NamespaceOpened(name_space=OTHERS, fingerprint=b"g" * 32), 1)
    return events


def stored(name_space: int = OURS, **changes: Any) -> Stored:
    given = {"medium": Medium.MEMORY, "group": 0, "hashes": A + B, "parents": bytes(32) + A}
    return Stored(name_space=name_space, **{**given, **changes})


def removed(name_space: int = OURS, **changes: Any) -> Removed:
    return Removed(name_space=name_space, **{"medium": Medium.MEMORY, "group": 0, "hashes": A + B, **changes})


def told(name: bytes) -> Any:
    """A hash as vLLM's events say it."""
    return maybe_convert_block_hash(BlockHash(name))


def take(events: CacheEvents) -> list[Any]:
    events.make()
    return list(events.take())


def saving(tokens: range, *, mask: bytes = NO_MASK, before: bytes = b"", **changes: Any) -> Any:
    """A request whose blocks are saved. `before`: the name of the block before them."""
    given = {"lora_request": None, "cache_salt": None, "mm_features": [], "prompt_embeds": None, "session_id": None}
    given |= {"all_token_ids": list(tokens), **changes}
    chain = SimpleNamespace(mask=mask, before=lambda group, position: before if position else bytes(32), tokens=32)
    return SimpleNamespace(request=SimpleNamespace(**given), settings=SimpleNamespace(tenant=""), chain=chain)

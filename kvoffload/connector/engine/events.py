"""What became of our cached blocks, as events of vLLM for its routers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvoffload.connector.block_chain import NO_MASK
from kvoffload.connector.engine.saved_tokens import SavedTokens
from kvoffload.connector.engine.vllm_compat import has_extra_keys
from kvoffload.connector.group_table import GroupTable
from kvoffload.connector.tracked_request import TrackedRequest
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import Medium, NamespaceOpened, Removed, Stored
from kvoffload.protocol.message import Event
from kvoffload.types import HASH_BYTES

MAX_EVENTS = 4096
"""Of the server that nobody has taken yet. Beyond it the oldest are lost."""
_NO_PARENT = bytes(HASH_BYTES)


class CacheEvents:
    """Heard on any thread, taken by the scheduler's. Tells what all engines of this identity have in the server's
    memory; blocks of requests whose names are masked for an adapter or a tenant have hashes that nobody knows.

    Blocks of full attention that this engine saved itself are told with their tokens, those that follow each other in
    one event, as far as their names come of tokens alone. Others are told by their names.
    """

    def __init__(self, fingerprint: bytes, groups: GroupTable) -> None:
        self._fingerprint = fingerprint
        self._groups = groups
        self._heard: deque[Stored | Removed] = deque(maxlen=MAX_EVENTS)
        self._name_spaces: set[int] = set()
        self._told = {(group, *groups.other_stages[group])[-1]: group for group in groups.of_table.values()}
        """The groups that are told of. Of stages, whose records come and go together, it is the last one's: what that
        has, the others have."""
        self._saved = {group: SavedTokens(groups.rules[group].block_size) for group in groups.prefixes}

    def note_saved(self, tracked: TrackedRequest, group: int, positions: range, names: bytes) -> None:
        """These blocks are about to be saved; on the scheduler's thread."""
        saved = self._saved.get(group)
        if saved is not None and not tracked.terms.tenant and not has_extra_keys(tracked.request):
            size = self._groups.rules[group].block_size
            saved.note(names, tracked.request.all_token_ids[positions.start * size : positions.stop * size])

    def hear(self, event: Event, number: int) -> None:
        """Hears an event of the server, on a thread of the client."""
        if isinstance(event, NamespaceOpened):
            # A server that came later counts anew.
            is_ours = event.fingerprint == self._fingerprint
            (self._name_spaces.add if is_ours else self._name_spaces.discard)(event.name_space)
        elif isinstance(event, Stored | Removed):
            is_ours = event.name_space in self._name_spaces and event.medium is Medium.MEMORY
            if is_ours and event.group in self._told:
                self._heard.append(event)

    def take(self, mask: bytes) -> Iterator[KVCacheEvent]:
        """What was heard since the last call, with the engine's own hashes."""
        while self._heard:
            event = self._heard.popleft()
            facts = self._groups.facts[event.group]
            hashes = _unmask(event.hashes, mask)
            if isinstance(event, Removed):
                yield BlockRemoved(
                    block_hashes=[maybe_convert_block_hash(BlockHash(name)) for name in hashes],
                    medium=MEDIUM_CPU,
                    group_idx=facts.index,
                )
                continue
            parents: list[bytes | None] = [None] * len(hashes)
            if event.parents:
                bare, unmasked = _cut(event.parents), _unmask(event.parents, mask)
                parents = [None if name == _NO_PARENT else parent for name, parent in zip(bare, unmasked, strict=True)]
            yield from self._tell_runs(event, hashes, parents)

    def _tell_runs(self, event: Stored, hashes: list[bytes], parents: list[bytes | None]) -> Iterator[BlockStored]:
        facts, saved = self._groups.facts[event.group], self._saved.get(self._told[event.group])
        begin = 0
        while begin < len(hashes):
            count, tokens = (0, []) if saved is None else saved.take(event.hashes, begin)
            end = begin + max(count, 1)
            if parents[begin + 1 : end] != hashes[begin : end - 1]:
                # They follow each other in their request, and their names do not say so.
                tokens, end = tokens[: facts.rule.block_size], begin + 1
            parent = parents[begin]
            yield BlockStored(
                block_hashes=[maybe_convert_block_hash(BlockHash(name)) for name in hashes[begin:end]],
                parent_block_hash=None if parent is None else maybe_convert_block_hash(BlockHash(parent)),
                # Empty: the server knows hashes alone.
                token_ids=tokens,
                block_size=facts.rule.block_size,
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=None,
                group_idx=facts.index,
            )
            begin = end


def _unmask(rows: bytes, mask: bytes) -> list[bytes]:
    if mask == NO_MASK:
        return _cut(rows)
    return _cut((as_rows(rows) ^ np.frombuffer(mask, np.uint8)).tobytes())


def _cut(rows: bytes) -> list[bytes]:
    return [rows[at : at + HASH_BYTES] for at in range(0, len(rows), HASH_BYTES)]

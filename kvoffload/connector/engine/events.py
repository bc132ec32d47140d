"""What became of our cached blocks, as events of vLLM for its routers."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvoffload.connector.block_chain import NO_MASK
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.saved_tokens import MAX_BLOCKS, SavedRun, SavedTokens
from kvoffload.connector.group_table import GroupTable
from kvoffload.connector.tracked_request import TrackedRequest
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import Medium, NamespaceOpened, Removed, Stored
from kvoffload.protocol.message import Event
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MAX_EVENTS = 4096
"""Of the server that nobody has taken yet. Beyond it the oldest are lost."""
PIECE = 64
"""So many events are made before others get their turn: the scheduler's thread waits for no more than these."""
MAX_NOTES = 128
"""Of a step's saved blocks each, that wait for the server to tell of them. Beyond it the oldest are told without
tokens."""
LOCAL = "LOCAL"
"""Where the publisher itself is."""
_NO_PARENT = bytes(HASH_BYTES)
_KNOWN_FIELDS = frozenset(BlockStored.__struct_fields__)
"""Older releases of vLLM have fewer."""


class _Note(NamedTuple):
    group: int
    positions: range
    names: bytes
    tokens: list[int]
    parent: bytes
    mask: bytes
    request: Request


class CacheEvents:
    """Tells what all engines of this identity have in the server's memory. Blocks are noted and events taken by the
    scheduler's thread, the server is heard on a thread of the client, and a third one makes of it what is told.

    Blocks that this engine saved itself are told with their tokens and what else makes their names, those that follow
    each other in one event. Others are told by their names, and those whose names are masked for a tenant, or by others
    for an adapter, have hashes that nobody knows.
    """

    def __init__(
        self,
        fingerprint: bytes,
        groups: GroupTable,
        *,
        kinds: Sequence[vllm_compat.GroupKind] = (),
        find_mask: Callable[[], bytes] = lambda: NO_MASK,
    ) -> None:
        """`kinds`: of the groups of the engine's block tables. `find_mask` tells what lies over the names of requests
        without an adapter."""
        self._fingerprint = fingerprint
        self._groups = groups
        self._find_mask = find_mask
        self._heard: deque[Stored | Removed] = deque(maxlen=MAX_EVENTS)
        self._noted: deque[_Note] = deque(maxlen=MAX_NOTES)
        self._told: deque[list[KVCacheEvent]] = deque(maxlen=MAX_EVENTS)
        self._name_spaces: set[int] = set()
        self._firsts = {(group, *groups.other_stages[group])[-1]: group for group in groups.of_table.values()}
        """The groups that are told of, with the first of their table. Of stages, whose records come and go together, it
        is the last one's: what that has, the others have."""
        self._saved = [SavedTokens(rule.block_size) for rule in groups.rules]
        self._constants = [
            _keep_known(
                block_size=facts.rule.block_size,
                medium=MEDIUM_CPU,
                group_idx=facts.index,
                locality=LOCAL,
                **(kinds[facts.index]._asdict() if facts.index < len(kinds) else {}),
            )
            for facts in groups.facts
        ]
        """By group: what all its events say."""
        self._masks: dict[tuple[int, bytes], bytes] = {}
        """Over the names of blocks that were told under another mask than others have, by group and name, the oldest
        first."""
        are_hashes = maybe_convert_block_hash(BlockHash(NO_MASK)) == NO_MASK
        self._convert: Callable[[BlockHash], Any] | None = None if are_hashes else maybe_convert_block_hash
        """None: events have the hashes as they are."""
        self._is_due = threading.Event()
        self._is_closed = self._has_failed = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """What is heard is made into events from now on."""
        self._thread = threading.Thread(target=self._keep_making, name="kvoffload-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nobody takes any more."""
        self._is_closed = True
        self._is_due.set()
        if self._thread is not None:
            self._thread.join()

    def note_saved(self, tracked: TrackedRequest, group: int, positions: range, names: bytes) -> None:
        """These blocks are about to be saved."""
        if tracked.terms.tenant:
            return
        size, request = self._groups.rules[group].block_size, tracked.request
        tokens = request.all_token_ids[positions.start * size : positions.stop * size]
        parent = tracked.chain.before(group, positions.start)
        self._noted.append(_Note(group, positions, names, tokens, parent, tracked.chain.mask, request))

    def hear(self, event: Event, number: int) -> None:
        """Hears an event of the server, on a thread of the client."""
        if isinstance(event, NamespaceOpened):
            # A server that came later counts anew.
            is_ours = event.fingerprint == self._fingerprint
            (self._name_spaces.add if is_ours else self._name_spaces.discard)(event.name_space)
        elif isinstance(event, Stored | Removed):
            is_ours = event.name_space in self._name_spaces and event.medium is Medium.MEMORY
            if is_ours and event.group in self._firsts:
                self._heard.append(event)
                self._is_due.set()

    def take(self) -> Iterator[KVCacheEvent]:
        """What was made since the last call, with the engine's own hashes."""
        while self._told:
            yield from self._told.popleft()

    def make(self) -> None:
        """Makes events of all that was heard; on one thread."""
        while self._heard:
            event = self._heard.popleft()
            self._take_notes()
            made = self._tell_stored(event) if isinstance(event, Stored) else self._tell_removed(event)
            told: list[KVCacheEvent] = []
            for one in made:
                told.append(one)
                if len(told) % PIECE == 0:
                    time.sleep(0)
            self._told.append(told)
            time.sleep(0)

    # ---- on a thread of its own ----

    def _keep_making(self) -> None:
        while not self._is_closed:
            self._is_due.wait()
            self._is_due.clear()
            try:
                self.make()
            except Exception:
                # Routers hear of it no more than of what was lost.
                if not self._has_failed:
                    logger.exception("what the server told of its blocks was not made into an event")
                self._has_failed = True

    def _take_notes(self) -> None:
        while self._noted:
            note = self._noted.popleft()
            size = self._groups.rules[note.group].block_size
            self._saved[note.group].note(
                SavedRun(
                    note.names,
                    note.tokens,
                    None if note.parent == _NO_PARENT else note.parent,
                    note.mask,
                    vllm_compat.list_extra_keys(note.request, note.positions, size),
                    _describe_request(note.request),
                )
            )

    def _tell_removed(self, event: Removed) -> Iterator[BlockRemoved]:
        yield self._remove(event.group, _unmask(event.hashes, self._find_mask()), event.hashes)

    def _remove(self, group: int, hashes: list[bytes], names: bytes) -> BlockRemoved:
        if self._masks:
            for at, name in enumerate(_cut(names)):
                mask = self._masks.pop((group, name), None)
                if mask is not None:
                    (hashes[at],) = _unmask(name, mask)
        constants = self._constants[group]
        return BlockRemoved(
            block_hashes=self._as_told(hashes),
            **{name: constants[name] for name in BlockRemoved.__struct_fields__ if name in constants},
        )

    def _tell_stored(self, event: Stored) -> Iterator[KVCacheEvent]:
        mask, saved = self._find_mask(), self._saved[self._firsts[event.group]]
        hashes = _unmask(event.hashes, mask)
        parents: list[bytes | None] = [None] * len(hashes)
        # Those of other groups do not say which block of their own group they follow.
        if event.parents and self._firsts[event.group] in self._groups.prefixes:
            bare, unmasked = _cut(event.parents), _unmask(event.parents, mask)
            parents = [None if name == _NO_PARENT else parent for name, parent in zip(bare, unmasked, strict=True)]
        begin = 0
        while begin < len(hashes):
            run = saved.take(event.hashes, begin)
            if run is None:
                # No tokens: the server knows hashes alone.
                yield self._store(event.group, hashes[begin : begin + 1], parents[begin], [])
                begin += 1
                continue
            end = begin + len(run.names) // HASH_BYTES
            own = hashes[begin:end] if run.mask == mask else _unmask(run.names, run.mask)
            parent = None if run.parent is None else _unmask(run.parent, run.mask)[0]
            yield self._store(event.group, own, parent, run.tokens, extra_keys=run.extra_keys, **run.about)
            if run.mask != mask:
                yield from self._note_masks(event.group, run)
            begin = end

    def _store(
        self, group: int, hashes: list[bytes], parent: bytes | None, tokens: list[int], **about: Any
    ) -> BlockStored:
        given = {"lora_id": None, "lora_name": None, **self._constants[group], **about}
        return BlockStored(
            block_hashes=self._as_told(hashes),
            parent_block_hash=None if parent is None else self._as_told([parent])[0],
            token_ids=tokens,
            **given,
        )

    def _as_told(self, hashes: list[bytes]) -> list[Any]:
        return hashes if self._convert is None else [self._convert(BlockHash(name)) for name in hashes]

    def _note_masks(self, group: int, run: SavedRun) -> Iterator[BlockRemoved]:
        """The server tells of their end by their names. What cannot be remembered has to be taken back at once."""
        for name in _cut(run.names):
            self._masks[group, name] = run.mask
        while len(self._masks) > MAX_BLOCKS:
            oldest, name = next(iter(self._masks))
            yield self._remove(oldest, [name], name)


def _keep_known(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in _KNOWN_FIELDS}


def _describe_request(request: Request) -> dict[str, Any]:
    adapter = request.lora_request
    return _keep_known(
        lora_id=None if adapter is None else adapter.adapter_id,
        lora_name=None if adapter is None else adapter.name,
        session_id=getattr(request, "session_id", None),
    )


def _unmask(rows: bytes, mask: bytes) -> list[bytes]:
    if mask == NO_MASK:
        return _cut(rows)
    return _cut((as_rows(rows) ^ np.frombuffer(mask, np.uint8)).tobytes())


def _cut(rows: bytes) -> list[bytes]:
    return [rows[at : at + HASH_BYTES] for at in range(0, len(rows), HASH_BYTES)]

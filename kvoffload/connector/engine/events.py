"""Reports the cache's blocks to routers, as events of vLLM."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvoffload.client import Heard, InventoryBegun, InventoryEnded
from kvoffload.connector.common.block_chain import NO_MASK
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.loadable import Change, LoadableBlocks
from kvoffload.connector.engine.saved_tokens import MAX_BLOCKS, SavedRun, SavedTokens
from kvoffload.connector.engine.told_blocks import Picture
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import EventsLost, Medium, NamespaceOpened, Removed, Stored
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

STEP_BLOCKS = 2048
"""Number of blocks after which a step of the engine takes no further event, as its loop waits while vLLM encodes them.
The next steps take the rest. (An event of a prompt has up to RUN_BLOCKS, with their tokens.)"""
MAX_EVENTS = 1024
"""Maximum number of the server's events that wait to be processed. Beyond it all of them are dropped, and so are later
ones until the server sends its whole inventory again."""
MADE_BLOCKS = 1 << 16
"""Maximum number of blocks in events that the engine has not taken. Beyond it no others are made, except for blocks
that were held until a block reported last."""
PIECE = 64
"""Number of events that are made before other threads get their turn: the scheduler's thread waits for no more."""
CLOSE_S = 1.0
"""How long the scheduler's thread waits for the thread that makes events to end, in seconds; it then ends by itself."""
RETRY_S = 1.0
"""Seconds until the next attempt to report all blocks again, when that is due and not possible yet."""
MAX_NOTES = 128
"""Maximum number of notes, each on blocks of one request, whose tokens were not looked at yet. Beyond it the oldest are
dropped, and their blocks are reported without tokens."""
RUN_BLOCKS = 256
"""Number of a note's blocks that are looked at before other threads get their turn."""


class _Place(NamedTuple):
    """The fields of events that say where blocks are; `ownership` names a tier slower than memory."""

    medium: str
    locality: str
    ownership: str | None = None


_PLACES = {
    Medium.MEMORY: _Place(MEDIUM_CPU, "LOCAL"),
    # Older releases of vLLM have no name for it.
    Medium.DISK: _Place("STORAGE", "LOCAL", "disk"),
    Medium.REMOTE: _Place("STORAGE", "REMOTE", "remote"),
}
_NO_PARENT = bytes(HASH_BYTES)
_KNOWN_FIELDS = frozenset(BlockStored.__struct_fields__)
"""The fields that this release of vLLM has in its events; older ones have fewer."""


_Told: TypeAlias = Stored | Removed | EventsLost | InventoryBegun | InventoryEnded
_Made: TypeAlias = BlockStored | BlockRemoved
_OVER: None = None
"""Yielded at the end of a piece of work that makes no event: other threads get their turn, or the work stops."""


class _Note(NamedTuple):
    group: int
    positions: range
    names: bytes
    parent: bytes
    mask: bytes
    weights: bytes
    """The mask of requests without an adapter, at the time of the note."""
    request: Request


class CacheEvents:
    """Makes events of the blocks that all engines of this identity have in the server's memory and its slower tiers.
    The scheduler's thread notes blocks and takes events, a thread of the client hears the server, and a third thread
    makes the events.

    Blocks of requests that this engine had are reported with their tokens and the other parts of their names, blocks
    that follow each other in one event. Other blocks are reported by name alone until such a request comes. If their
    names are masked, for a tenant, or by other engines for an adapter, no router can match their hashes.

    With several groups, only blocks of full attention are reported, and of these only such as a load can bring.
    """

    def __init__(
        self,
        fingerprint: bytes,
        groups: GroupTable,
        *,
        kinds: Sequence[vllm_compat.GroupKind] = (),
        find_mask: Callable[[], bytes] = lambda: NO_MASK,
        again_s: float = 0.0,
    ) -> None:
        """`kinds` are those of the engine's block tables. `find_mask` returns the mask over the names of requests
        without an adapter. All blocks are reported again every `again_s`; 0: never."""
        self._again_s = again_s
        self._fingerprint = fingerprint
        self._groups = groups
        self._find_mask = find_mask
        self._mask = find_mask()
        """The mask over the names of reported blocks; a reset of the weights makes another one."""
        self._ask_again: Callable[[], bool] = lambda: False
        self._heard: deque[_Told] = deque()
        self._has_lost = False
        """Whether the server's events were lost, so that further ones are ignored until the next inventory."""
        self._noted: deque[_Note] = deque(maxlen=MAX_NOTES)
        self._made: deque[_Made] = deque()
        self._made_blocks = self._taken_blocks = 0
        """Numbers of blocks in all events made, and in all taken, so far. The thread that makes events owns the first,
        the thread that takes them the second."""
        self._is_listing = False
        """Whether an inventory has begun and not ended."""
        self._name_spaces: set[int] = set()
        self._firsts = {(group, *groups.other_stages[group])[-1]: group for group in groups.of_table.values()}
        """The groups whose events are used, each with the first group of its table. With stages, whose records come and
        go together, it is the last stage's group: blocks that it has, the others have too."""
        self._filters = len(groups.of_table) > 1 and groups.first_prefix is not None
        """Whether only blocks are reported that all groups together can load."""
        self._wants_again = self._repeats = False
        """Whether the next inventory repeats blocks that were reported before, and whether the present one does."""
        self._saved = [SavedTokens(rule.block_size) for rule in groups.rules]
        self._pictures = {medium: self._begin_picture(kinds, medium) for medium in Medium}
        are_hashes = maybe_convert_block_hash(BlockHash(NO_MASK)) == NO_MASK
        self._convert: Callable[[BlockHash], Any] | None = None if are_hashes else maybe_convert_block_hash
        """Converts a hash to the form that events have; None: events have the hashes as they are."""
        self._is_due = threading.Event()
        self._is_closed = self._has_failed = False
        self._thread: threading.Thread | None = None

    def start(self, ask_again: Callable[[], bool]) -> None:
        """Starts the thread that makes events. `ask_again` asks the server for its inventory again, and returns False
        if it has none."""
        self._ask_again = ask_again
        self._thread = threading.Thread(target=self._keep_making, name="kvoffload-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread that makes events: none is taken any more. Waits for `CLOSE_S` at most."""
        self._is_closed = True
        self._is_due.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def note_tokens(self, tracked: TrackedRequest, group: int, positions: range, names: bytes) -> None:
        """Notes blocks that are about to be saved, to report them with their tokens."""
        if tracked.settings.tenant or (self._filters and group != self._groups.first_prefix):
            return
        parent = tracked.chain.before(group, positions.start)
        self._noted.append(
            _Note(group, positions, names, parent, tracked.chain.mask, self._find_mask(), tracked.request)
        )

    def note_found(self, tracked: TrackedRequest, tokens: int) -> None:
        """Notes the blocks of a request's first tokens, which were found: they may have been reported without
        tokens."""
        group = self._groups.first_prefix
        if group is not None and tokens:
            positions = range(min(tokens, tracked.chain.tokens) // self._groups.rules[group].block_size)
            self.note_tokens(tracked, group, positions, tracked.chain.names(group, positions))
            self._is_due.set()

    def hear(self, event: Heard, number: int) -> None:
        """Hears an event of the server, on a thread of the client."""
        if isinstance(event, InventoryBegun | InventoryEnded):
            self._is_listing = isinstance(event, InventoryBegun)
        if isinstance(event, NamespaceOpened):
            # A later server numbers its name spaces from the start again.
            is_ours = event.fingerprint == self._fingerprint
            (self._name_spaces.add if is_ours else self._name_spaces.discard)(event.name_space)
        elif isinstance(event, Stored | Removed):
            is_ours = event.name_space in self._name_spaces
            if is_ours and event.group in self._firsts and not self._has_lost:
                self._add(event)
        elif isinstance(event, InventoryBegun):
            if self._has_lost:
                self._has_lost = False
                self._add(EventsLost(count=0))
            self._add(event)
        elif isinstance(event, EventsLost) or (isinstance(event, InventoryEnded) and not self._has_lost):
            self._add(event)

    def take(self) -> Iterator[KVCacheEvent]:
        """Takes events that were made since the last call, as many as one step may report, with the engine's own
        hashes."""
        was_full, last = not self._has_room, self._taken_blocks + STEP_BLOCKS
        while self._made and self._taken_blocks < last:
            event = self._made.popleft()
            self._taken_blocks += len(event.block_hashes)
            yield event
        if self._heard or was_full or self._find_mask() != self._mask:
            self._is_due.set()

    def tell_again(self) -> bool:
        """Reports all blocks again, for listeners that came later. Returns False if that is not possible now, because
        events have not been taken yet, or an inventory has not ended and would start over."""
        if self._made or self._heard or self._is_listing:
            return False
        self._wants_again = True
        self._ask_again()
        return True

    def make(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Makes events of what was heard, as far as there is room for them; on one thread. Stops when `is_over` returns
        True."""
        self._make_all(self._follow_mask(), is_over)
        while self._heard and self._has_room and not is_over():
            self._make_all(self._take_notes(), is_over)
            try:
                event = self._heard.popleft()
            except IndexError:
                # The queue overflowed at this moment, and was cleared.
                break
            self._make_all(self._make_of(event), is_over)
        self._make_all(self._take_notes(), is_over)
        # Without room, the inventory would be lost like the events that it replaces.
        if self._has_lost and not (self._heard or is_over()) and self._has_room and not self._ask_again():
            self._has_lost = False

    @property
    def _has_room(self) -> bool:
        return self._made_blocks - self._taken_blocks < MADE_BLOCKS

    def _add(self, event: _Told) -> None:
        if len(self._heard) >= MAX_EVENTS:
            self._heard.clear()
            self._has_lost = True
        else:
            self._heard.append(event)
        self._is_due.set()

    # ---- on a thread of its own ----

    def _keep_making(self) -> None:
        again_s = time.monotonic() + self._again_s
        while not self._is_closed:
            left_s = again_s - time.monotonic()
            self._is_due.wait((left_s if left_s > 0 else RETRY_S) if self._again_s else None)
            self._is_due.clear()
            try:
                if self._again_s and time.monotonic() >= again_s and self.tell_again():
                    again_s = time.monotonic() + self._again_s
                self.make(lambda: self._is_closed)
            except Exception:
                # Routers lose these events without notice, as they do when the queue overflows.
                if not self._has_failed:
                    logger.exception("the server's news of its blocks could not be made into events")
                self._has_failed = True

    def _make_all(self, made: Iterator[_Made | None], is_over: Callable[[], bool]) -> None:
        if is_over():
            return
        for count, event in enumerate(made, 1):
            if event is not None:
                self._made_blocks += len(event.block_hashes)
                self._made.append(event)
            if event is None or count % PIECE == 0:
                time.sleep(0)
            if is_over():
                return
        time.sleep(0)

    def _follow_mask(self) -> Iterator[_Made | None]:
        """Reports all blocks as removed after a reset of the weights: this engine can load none of them any more."""
        mask = self._find_mask()
        if mask == self._mask:
            return
        for picture in self._pictures.values():
            yield from self._make_stale(picture)
            picture.loadable = self._make_loadable()
            yield from self._tell_stale(picture)
            picture.masks.clear()
        self._saved = [SavedTokens(rule.block_size) for rule in self._groups.rules]
        self._mask = mask
        self._ask_again()

    def _take_notes(self) -> Iterator[_Made | None]:
        """Keeps the tokens of noted blocks, and reports blocks again that were reported without them."""
        while self._noted and self._has_room:
            note = self._noted.popleft()
            yield from self._follow_mask()
            if note.weights != self._mask:
                continue
            for first in range(0, len(note.names) // HASH_BYTES, RUN_BLOCKS):
                names = _cut(note.names[first * HASH_BYTES : (first + RUN_BLOCKS) * HASH_BYTES])
                known = self._saved[note.group].count_known(names)
                if known < len(names):
                    self._note_run(note, first + known, first + len(names))
                for picture in self._pictures.values():
                    bare = [name for name in names if picture.told.get((note.group, name)) is False]
                    if bare:
                        picture.told.update(dict.fromkeys(((note.group, name) for name in bare), True))
                        yield from self._tell_all(picture, note.group, bare, [_NO_PARENT] * len(bare))
                yield _OVER

    def _note_run(self, note: _Note, first: int, end: int) -> None:
        """Keeps the tokens, and the other parts of the names, of some of a note's blocks."""
        size = self._groups.rules[note.group].block_size
        positions = range(note.positions.start + first, note.positions.start + end)
        parent = note.names[(first - 1) * HASH_BYTES : first * HASH_BYTES] if first else note.parent
        self._saved[note.group].note(
            SavedRun(
                note.names[first * HASH_BYTES : end * HASH_BYTES],
                np.array(note.request.all_token_ids[positions.start * size : positions.stop * size], np.int64),
                None if parent == _NO_PARENT else parent,
                note.mask,
                vllm_compat.list_extra_keys(note.request, positions, size),
                _describe_request(note.request),
            )
        )

    def _make_of(self, event: _Told) -> Iterator[_Made | None]:
        memory = self._pictures[Medium.MEMORY]
        if isinstance(event, InventoryBegun):
            yield from self._make_stale(memory)
            memory.loadable = self._make_loadable()
            self._repeats, self._wants_again = self._wants_again, False
        elif isinstance(event, InventoryEnded):
            self._repeats = False
            yield from self._tell_stale(memory)
        elif isinstance(event, EventsLost):
            # For memory, an inventory follows.
            for picture in self._pictures.values():
                if picture is not memory:
                    yield from self._make_stale(picture)
                    picture.loadable = self._make_loadable()
                    yield from self._tell_stale(picture)
        elif isinstance(event, Stored):
            yield from self._tell_stored(event)
        else:
            yield from self._tell_removed(event)

    def _begin_picture(self, kinds: Sequence[vllm_compat.GroupKind], medium: Medium) -> Picture:
        place = _PLACES[medium]
        constants = [
            _keep_known(
                block_size=facts.rule.block_size,
                group_idx=facts.index,
                **place._asdict(),
                **(kinds[facts.index]._asdict() if facts.index < len(kinds) else {}),
            )
            for facts in self._groups.facts
        ]
        return Picture(constants, self._make_loadable())

    def _make_loadable(self) -> LoadableBlocks | None:
        groups = self._groups
        if not self._filters or groups.first_prefix is None:
            return None
        rules = {first: groups.rules[first] for first in self._firsts.values()}
        return LoadableBlocks(rules, first_prefix=groups.first_prefix, alignment=groups.alignment)

    def _make_stale(self, picture: Picture) -> Iterator[None]:
        """Marks all reported blocks as stale, together with those that an unfinished inventory has not confirmed: they
        may be gone."""
        while picture.release_some(RUN_BLOCKS):
            yield _OVER
        if not picture.stale:
            picture.stale, picture.told = picture.told, {}
        while picture.told:
            for _ in range(min(len(picture.told), RUN_BLOCKS)):
                key, is_with_tokens = picture.told.popitem()
                picture.stale[key] = is_with_tokens
            yield _OVER

    def _tell_stale(self, picture: Picture) -> Iterator[_Made | None]:
        """Reports stale blocks as removed: they were not in the inventory, so they may be gone."""
        while picture.stale:
            (group, name), _ = picture.stale.popitem()
            names = [name]
            while picture.stale and len(names) < PIECE:
                (other, name), is_with_tokens = picture.stale.popitem()
                if other != group:
                    picture.stale[other, name] = is_with_tokens
                    break
                names.append(name)
            yield self._remove(picture, group, names)

    def _tell_removed(self, event: Removed) -> Iterator[_Made | None]:
        picture = self._pictures[event.medium]
        group, names = self._firsts[event.group], _cut(event.hashes)
        if picture.loadable is None:
            yield from self._forget(picture, group, names)
        else:
            yield from self._tell_change(picture, picture.loadable.note_removed(group, names))

    def _tell_stored(self, event: Stored) -> Iterator[_Made | None]:
        picture = self._pictures[event.medium]
        group, names = self._firsts[event.group], _cut(event.hashes)
        parents = _cut(event.parents) if event.parents else names
        if picture.loadable is None:
            # Blocks of groups without full attention do not say which block of their own group they follow.
            has_parents = group in self._groups.prefixes
            yield from self._tell(picture, group, names, parents if has_parents else [_NO_PARENT] * len(names))
        else:
            yield from self._tell_change(picture, picture.loadable.note_stored(group, names, parents))

    def _tell_change(self, picture: Picture, change: Change) -> Iterator[_Made | None]:
        assert self._groups.first_prefix is not None
        group = self._groups.first_prefix
        if change.lost:
            yield from self._forget(picture, group, change.lost)
        if change.gained:
            names, parents = zip(*change.gained, strict=True)
            yield from self._tell(picture, group, list(names), list(parents))

    def _forget(self, picture: Picture, group: int, names: list[bytes]) -> Iterator[_Made | None]:
        known = []
        for name in names:
            key = group, name
            picture.release(key)
            if picture.told.pop(key, None) is not None or picture.stale.pop(key, None) is not None:
                known.append(name)
        if known:
            yield self._remove(picture, group, known)

    def _tell(self, picture: Picture, group: int, names: list[bytes], parents: list[bytes]) -> Iterator[_Made | None]:
        """Reports blocks that were not reported yet, or without tokens that are known now. Blocks that were held for
        them follow."""
        new = yield from self._tell_new(picture, group, names, parents)
        while new:
            ahead, new = new, []
            for other in self._pictures.values():
                held = other.walk_held(group, ahead) if other.held else iter(())
                while part := list(islice(held, RUN_BLOCKS)):
                    names, parents = ([one[at] for one in part] for at in range(2))
                    new += yield from self._tell_new(other, group, names, parents)
                    yield _OVER

    def _tell_new(
        self, picture: Picture, group: int, names: list[bytes], parents: list[bytes]
    ) -> Generator[_Made | None, None, list[bytes]]:
        """Reports the new ones among these blocks, and returns their names."""
        saved = self._saved[group]
        chosen = []
        for at, name in enumerate(names):
            key, parent = (group, name), parents[at]
            if parent == name:
                # The server's listing did not know the parent (any more).
                run = saved.find(name, 0)
                parent = _NO_PARENT if run is None or run.parent is None else run.parent
            if not (parent == _NO_PARENT or key in picture.told or self._is_known(picture, (group, parent))):
                picture.hold(key, parent)
                continue
            picture.release(key)
            was_with_tokens = picture.stale.pop(key, None)
            if was_with_tokens is not None:
                picture.told[key] = was_with_tokens
            has_tokens = saved.knows(name)
            known = picture.told.get(key)
            is_new = known is None and picture.has_room
            is_again = (has_tokens and known is False) or (self._repeats and was_with_tokens is not None)
            if is_new or is_again:
                picture.told[key] = has_tokens
                chosen.append(at)
        if len(chosen) < len(names):
            names, parents = [names[at] for at in chosen], [parents[at] for at in chosen]
        yield from self._tell_all(picture, group, names, parents)
        return names

    def _is_known(self, picture: Picture, key: tuple[int, bytes]) -> bool:
        """Whether a block was reported so that others may follow it, in `picture` or in another place."""
        if key in picture.told:
            return True
        # While an inventory repeats all blocks, new listeners do not know the stale ones, which it has not reached.
        pictures = self._pictures.values()
        return any(key in other.told or (key in other.stale and not self._repeats) for other in pictures)

    def _tell_all(
        self, picture: Picture, group: int, names: list[bytes], parents: list[bytes]
    ) -> Iterator[_Made | None]:
        mask, saved, rows = self._mask, self._saved[group], b"".join(names)
        hashes, before = _unmask(rows, mask), _unmask(b"".join(parents), mask)
        begin = 0
        while begin < len(hashes):
            run = saved.find(rows, begin)
            if run is None:
                # No tokens: the server knows hashes alone.
                has_none = parents[begin] in (_NO_PARENT, names[begin])
                yield self._store(picture, group, hashes[begin : begin + 1], None if has_none else before[begin], [])
                begin += 1
                continue
            end = begin + len(run.names) // HASH_BYTES
            own = hashes[begin:end] if run.mask == mask else _unmask(run.names, run.mask)
            parent = None if run.parent is None else _unmask(run.parent, run.mask)[0]
            tokens = run.tokens.tolist()
            yield self._store(picture, group, own, parent, tokens, extra_keys=run.extra_keys, **run.about)
            if run.mask != mask:
                yield from self._note_masks(picture, group, run)
            begin = end

    def _remove(self, picture: Picture, group: int, names: list[bytes]) -> BlockRemoved:
        hashes = _unmask(b"".join(names), self._mask)
        if picture.masks:
            for at, name in enumerate(names):
                mask = picture.masks.pop((group, name), None)
                if mask is not None:
                    (hashes[at],) = _unmask(name, mask)
        constants = picture.constants[group]
        return BlockRemoved(
            block_hashes=self._as_told(hashes),
            **{name: constants[name] for name in BlockRemoved.__struct_fields__ if name in constants},
        )

    def _store(
        self, picture: Picture, group: int, hashes: list[bytes], parent: bytes | None, tokens: list[int], **about: Any
    ) -> BlockStored:
        given = {"lora_id": None, "lora_name": None, **picture.constants[group], **about}
        return BlockStored(
            block_hashes=self._as_told(hashes),
            parent_block_hash=None if parent is None else self._as_told([parent])[0],
            token_ids=tokens,
            **given,
        )

    def _as_told(self, hashes: list[bytes]) -> list[Any]:
        return hashes if self._convert is None else [self._convert(BlockHash(name)) for name in hashes]

    def _note_masks(self, picture: Picture, group: int, run: SavedRun) -> Iterator[BlockRemoved]:
        """Notes the masks of these blocks, since the server reports removals by name alone. If there are too many, the
        oldest blocks are reported as removed at once."""
        for name in _cut(run.names):
            picture.masks[group, name] = run.mask
        while len(picture.masks) > MAX_BLOCKS:
            oldest, name = next(iter(picture.masks))
            picture.told.pop((oldest, name), None)
            yield self._remove(picture, oldest, [name])


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

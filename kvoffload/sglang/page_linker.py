"""One rank's pages between SGLang's pool and the cache: finds restorable pages, loads them, and saves new ones.

The engine asks on its scheduler's thread, between two forwards, so nothing here waits without a bound. A load copies at
once and answers for the bytes. A save is copied while the engine goes on, and told as done when it is.
"""

from __future__ import annotations

import logging
import time
from binascii import unhexlify
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import Publication, ReservedSlots, SegmentMap
from kvoffload.client import Client
from kvoffload.errors import KVOffloadError, NativeError, StorageError
from kvoffload.hash_rows import as_rows, choose_rows
from kvoffload.native import finish_digests
from kvoffload.sglang.hit_table import Hit, HitTable
from kvoffload.sglang.page_settings import FULL, PageSettings
from kvoffload.transfer import CopyDirection, CopyEngine, CopyItems, FinishedCopy
from kvoffload.transfer.copy_engine import CopyTicket
from kvoffload.types import HASH_BYTES

logger = logging.getLogger(__name__)

LOAD_WAIT_S = 30.0
"""For the copy of one request's pages. A device that takes longer is broken."""
RESET_WAIT_S = 10.0
"""For saves on their way, when the engine empties its cache."""
SAVE_WAIT_S = 60.0
"""A save that has not ended by then is given up: the engine gets its pages back."""
MAX_FAULT_LINES = 20
NO_MASK = bytes(HASH_BYTES)
_Word = tuple[int, bytes]
"""A group, and the name of a page."""


@dataclass(frozen=True, eq=False)
class GroupRows:
    """Pages of one group that the engine offers or wants: their keys, and their rows in the pool."""

    group: int
    keys: Sequence[str]
    rows: npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class _Chosen:
    """Pages of one group that are copied: their names and numbers, and where their records are."""

    group: int
    names: bytes
    pages: npt.NDArray[np.int64]
    addresses: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        return len(self.pages)

    def words(self) -> set[_Word]:
        return {(self.group, name.tobytes()) for name in as_rows(self.names)}


@dataclass(eq=False)
class _Save:
    """Pages that the engine offered at once, and locks until this is told as done."""

    pieces: list[tuple[_Chosen, ReservedSlots]] = field(default_factory=list)
    ticket: CopyTicket | None = None
    memory: list[SegmentMap] = field(default_factory=list)
    """Stays as long as the copy may write to it."""
    is_whole: bool = True
    """All that was offered is kept, if this copy ends well."""
    result: bool | None = None
    begun_s: float = 0.0
    words: set[_Word] = field(default_factory=set)


class PageLinker:
    """Owned by the scheduler's thread. Ranks of one engine are asked the same in the same order, and whatever they must
    agree in depends on that alone: every offer is accepted, and in an engine of several ranks every load."""

    def __init__(
        self,
        settings: PageSettings,
        cache: Client,
        engine: CopyEngine,
        *,
        mask: bytes = NO_MASK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mask`: of the weights; what was saved under one is never found under another."""
        self.settings = settings
        self.cache = cache
        self.mask = mask
        self._engine: CopyEngine | None = engine
        self._clock = clock
        self._hits = HitTable(settings, cache, clock=clock)
        self._loaded: dict[str, bool] = {}
        """Whether a load's bytes are there, for each request that waits for its forward."""
        self._saves: deque[_Save] = deque()
        """In the order in which they were offered, until they are told as done."""
        self._copies: dict[CopyTicket, _Save] = {}
        self._ended: dict[CopyTicket, FinishedCopy] = {}
        self._under_way: set[_Word] = set()
        self._forgotten: set[_Word] = set()
        """Pages that were reported as invalid. The index may still show them when the engine offers them again."""
        self.faults = 0
        self.is_distrusted = False
        """Pages of the engine's cache may be of other weights than those that names stand for."""

    # ---- loads ----

    def lookup(self, rid: str, keys: Sequence[str], *, is_counted: bool = True) -> list[int]:
        """Every number of pages, from the first on, that is held for this request from here on.

        `is_counted`: the server hears of it as a prompt.
        """
        if self._engine is None or self.is_distrusted or not keys:
            self._hits.drop(rid)
            return []
        return self._hits.find(rid, self._name(keys), is_counted=is_counted)

    def load(self, rid: str, parts: Sequence[GroupRows]) -> bool:
        """Copies the pages that `lookup` found into these rows of the pools. False: the load failed, and the engine
        computes them. An engine with several ranks learns of a failure by `take_loaded` instead.

        NativeError: a copy does not end, so that the rows cannot be given to another request; the engine must end.
        """
        hit = self._hits.take(rid)
        fault = "its lease is over" if hit is None else self._copy_hit(hit, parts)
        if hit is not None:
            self._hits.release(hit)
        self._hits.prompts.end(rid, is_loaded=not fault)
        if fault:
            self.note_line(f"load of request {rid} failed", fault)
        if fault and self.settings.ranks == 1:
            return False
        self._loaded[rid] = not fault
        return True

    def take_loaded(self) -> tuple[bool, ...]:
        """Returns of each load since the last call whether its bytes are there. The forward that reads them begins."""
        loaded, self._loaded = self._loaded, {}
        return tuple(loaded.values())

    def cancel_load(self, rid: str) -> bool:
        """The request has ended before its forward. False: there was no load of it."""
        self._hits.drop(rid)
        return self._loaded.pop(rid, None) is not None

    # ---- saves ----

    def begin_step(self) -> None:
        """Asks for slots before a save needs them. The engine's loop calls this at each turn, with or without
        requests."""
        self.cache.begin_step()
        self.cache.ready_slots()
        self._hits.prompts.end_old(self._clock())

    def offload(self, parts: Sequence[GroupRows]) -> None:
        """Keeps what is not kept yet, as far as there is room. The pages stay as they are until it is told as done."""
        save = _Save(result=False, begun_s=self._clock())
        self._saves.append(save)
        try:
            self._begin_save(save, parts)
        except Exception as fault:  # noqa: BLE001  (an offer that is never told as done keeps its pages for ever)
            if save.ticket is None:
                self._abort_pieces(save)
            save.result = False
            self.note_line("a save failed", str(fault) or type(fault).__name__)

    def count_done(self) -> int:
        """Offers, in their order, that can be told as done."""
        self._collect()
        self._give_up_late()
        done = 0
        for save in self._saves:
            if save.result is None:
                break
            done += 1
        return done

    def pop_done(self) -> bool:
        """Takes the first save, which is done, and says whether all of its pages are kept."""
        return bool(self._saves.popleft().result)

    def end_saves(self) -> None:
        """Waits until every save has ended, within its bound; what has not by then is given up."""
        if self._engine is not None and self._copies:
            self._engine.fence(RESET_WAIT_S)
            self._collect()
        for save in self._copies.values():
            save.result = False

    # ---- the engine's cache as a whole ----

    def reset(self, mask: bytes) -> None:
        """The engine has emptied its cache. What is saved from here on is named for `mask`."""
        self.end_saves()
        self._saves.clear()
        self._loaded.clear()
        self._hits.drop_all()
        self.mask, self.is_distrusted = mask, False

    def distrust(self, why: str = "the weights changed and the cache was not flushed") -> None:
        """The weights are others, and the engine has kept its cache: until it empties it, nothing is saved or found."""
        if not self.is_distrusted:
            self.is_distrusted = True
            self.note_line("pages are neither saved nor restored", why)

    def has_ended(self) -> bool:
        """After a load that has not: whether no copy runs any more. Nothing is copied from then on."""
        try:
            self._close_engine()
        except NativeError:
            return False
        return True

    def close(self) -> None:
        """Gives back what is held; nothing is restorable any more."""
        self.reset(self.mask)
        self._close_engine()
        self.cache.close()

    def note_fault(self, hook: str, fault: Exception) -> None:
        self.note_line(f"{hook} failed", str(fault) or type(fault).__name__)

    def note_line(self, what: str, why: str) -> None:
        self.faults += 1
        if self.faults <= MAX_FAULT_LINES:
            last = ", no further ones are logged" if self.faults == MAX_FAULT_LINES else ""
            logger.warning("%s: %s%s", what, why, last)

    # ---- inside ----

    def _name(self, keys: Sequence[str]) -> bytes:
        names = unhexlify("".join(keys))
        if len(names) != len(keys) * HASH_BYTES:
            raise StorageError(f"{len(keys)} keys of pages have {len(names)} bytes", remedy="")
        if self.mask == NO_MASK:
            return names
        # Masks in a row: one for each page at a time takes four times as long.
        masks = np.frombuffer(self.mask * len(keys), np.uint64)
        return (np.frombuffer(names, np.uint64) ^ masks).tobytes()

    def _find_pages(self, part: GroupRows) -> npt.NDArray[np.int64]:
        """The engine names every row; pages are whole and lie in order."""
        rows, count, page = part.rows, len(part.keys), self.settings.groups[part.group].page_rows
        if len(rows) != count * page:
            raise StorageError(f"{len(rows)} rows for {count} pages of {page}", remedy="")
        pages = rows[::page] // page
        if not np.array_equal(rows, (pages[:, None] * page + np.arange(page)).reshape(-1)):
            raise StorageError("the rows of a page do not follow each other", remedy="")
        return pages

    def _copy_hit(self, hit: Hit, parts: Sequence[GroupRows]) -> str:
        """Loads a hit. Returns the fault; empty: every byte is where it belongs. NativeError: it is unknown when the
        copy ends."""
        try:
            chosen = self._choose_held(hit, parts)
            memory = self.cache.memory(hit.leases[0].memory_id)
            ticket = self._submit(CopyDirection.LOAD, chosen, [memory] * len(chosen), self.settings.verify_always)
        except (KVOffloadError, ValueError) as fault:
            return str(fault)
        assert self._engine is not None
        if not self._engine.fence(LOAD_WAIT_S):
            self._close_engine()
        self._collect()
        finished, count = self._ended.pop(ticket, None), sum(map(len, chosen))
        if finished is None:
            raise NativeError(f"a copy to {count} pages did not end in {LOAD_WAIT_S:.0f} s")
        if finished.fault or finished.digests is None:
            return finished.fault
        wrong = 0
        # Those of one request at most: it is computed next.
        forgotten: set[_Word] = set()
        for part, digests in self._digest(finished, chosen):
            # A digest of 0: no digest of this record has been made yet.
            is_wrong = (digests != part.digests) & (part.digests != 0)
            if is_wrong.any():
                # The next request for these pages computes them.
                names = choose_rows(part.names, is_wrong)
                self.cache.invalidate(part.group, names)
                forgotten |= {(part.group, name.tobytes()) for name in as_rows(names)}
                wrong += int(is_wrong.sum())
        if not wrong:
            return ""
        self._forgotten = forgotten
        return f"{wrong} of {count} records differ from the saved bytes"

    def _choose_held(self, hit: Hit, parts: Sequence[GroupRows]) -> list[_Chosen]:
        """StorageError: the engine wants other pages than it was told of."""
        if sorted(part.group for part in parts) != list(range(len(self.settings.groups))):
            raise StorageError(f"it asks for groups {[part.group for part in parts]}", remedy="")
        if self._engine is None or not all(self.cache.may_copy(lease) for lease in hit.leases):
            raise StorageError("the memory of its records cannot be copied from any more", remedy="")
        length = max(len(part.keys) for part in parts if part.group == FULL)
        chosen = []
        for part in parts:
            first, held = length - len(part.keys), hit.groups[part.group]
            names = self._name(part.keys)
            is_asked = 0 <= first <= self.settings.groups[part.group].first_needed(length)
            wanted = hit.names[max(first, 0) * HASH_BYTES : length * HASH_BYTES]
            if not names or not is_asked or wanted != names or not held.is_held[first:length].all():
                raise StorageError("it asks for other pages than it was told of", remedy="")
            addresses, digests = held.addresses[first:length], held.digests[first:length]
            chosen.append(_Chosen(part.group, names, self._find_pages(part), addresses, digests))
        return chosen

    def _submit(
        self, direction: CopyDirection, chosen: Sequence[_Chosen], memory: Sequence[SegmentMap], has_digests: bool
    ) -> CopyTicket:
        assert self._engine is not None
        slots = [
            one.pointers(part.addresses, self.settings.groups[part.group].record_bytes)
            for part, one in zip(chosen, memory, strict=True)
        ]
        items = CopyItems(
            group=np.repeat([part.group for part in chosen], [len(part) for part in chosen]),
            block=np.concatenate([part.pages for part in chosen]),
            slot=np.concatenate(slots),
        )
        return self._engine.submit(direction, items, has_digests=has_digests)

    def _digest(
        self, finished: FinishedCopy, chosen: Sequence[_Chosen]
    ) -> Iterator[tuple[_Chosen, npt.NDArray[np.uint64]]]:
        """Yields each part with its digests as they are kept."""
        assert finished.digests is not None
        first = 0
        for part in chosen:
            made = finish_digests(
                finished.digests[first : first + len(part)].tobytes(),
                self.settings.groups[part.group].record_bytes,
                fingerprint=self.settings.fingerprint,
                block_hashes=part.names,
                group=part.group,
                shard=0,
            )
            first += len(part)
            yield part, np.frombuffer(made, np.uint64)

    def _begin_save(self, save: _Save, parts: Sequence[GroupRows]) -> None:
        if self.is_distrusted or self._engine is None:
            return
        for part in parts:
            self._take_slots(save, part)
        if not save.pieces:
            save.result = save.is_whole
            return
        chosen = [piece for piece, _ in save.pieces]
        save.ticket = self._submit(CopyDirection.SAVE, chosen, save.memory, has_digests=True)
        save.result = None
        save.words = {word for piece in chosen for word in piece.words()}
        self._under_way |= save.words
        self._forgotten -= save.words
        self._copies[save.ticket] = save

    def _take_slots(self, save: _Save, part: GroupRows) -> None:
        """Takes slots for those pages that are neither kept nor on their way."""
        names = self._name(part.keys)
        words = [(part.group, name.tobytes()) for name in as_rows(names)]
        pages = self._find_pages(part)
        forgotten = np.array([word in self._forgotten for word in words], np.bool_)
        missing = ~self.cache.lookup(part.group, names) | forgotten
        under_way = np.array([word in self._under_way for word in words], np.bool_)
        wanted = np.flatnonzero(missing & ~under_way)
        save.is_whole &= not (missing & under_way).any()
        if not len(wanted):
            return
        slots = self.cache.take(part.group, len(wanted))
        save.is_whole &= len(slots) == len(wanted)
        if not len(slots):
            return
        wanted = wanted[: len(slots)]
        piece = _Chosen(part.group, choose_rows(names, wanted), pages[wanted], slots.addresses)
        save.pieces.append((piece, slots))
        if not self.cache.may_copy(slots):
            raise StorageError("the memory of its slots is not mapped here", remedy="")
        save.memory.append(self.cache.memory(slots.memory_id))

    def _collect(self) -> None:
        if self._engine is None:
            return
        for finished in self._engine.poll():
            save = self._copies.pop(finished.ticket, None)
            if save is None:
                self._ended[finished.ticket] = finished
            else:
                self._finish_save(save, finished)

    def _finish_save(self, save: _Save, finished: FinishedCopy) -> None:
        self._under_way -= save.words
        if save.result is not None or finished.fault:
            # The save was given up meanwhile, or it failed: no engine may read these slots.
            self._abort_pieces(save)
            if finished.fault:
                self.note_line("a save failed", finished.fault)
            save.result = False
        else:
            # Windows are published before the pages that they belong to: a reader that finds all pages finds their
            # windows too.
            told = [
                self.cache.publish(Publication(slots, hashes=part.names, digests=digests))
                for (_, slots), (part, digests) in reversed(
                    list(zip(save.pieces, self._digest(finished, [part for part, _ in save.pieces]), strict=True))
                )
            ]
            save.result = all(told) and save.is_whole
        save.memory, save.pieces = [], []

    def _abort_pieces(self, save: _Save) -> None:
        for _, slots in save.pieces:
            self.cache.abort(slots)
        save.pieces = []

    def _give_up_late(self) -> None:
        now_s = self._clock()
        for save in self._saves:
            if save.result is not None:
                continue
            if now_s - save.begun_s < SAVE_WAIT_S:
                return
            self.note_line("a save is given up", f"its copy has not ended in {SAVE_WAIT_S:.0f} s")
            save.result = False

    def _close_engine(self) -> None:
        """NativeError: a copy still runs."""
        engine = self._engine
        if engine is None:
            return
        engine.close()
        self._collect()
        self._engine = None

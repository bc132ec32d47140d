"""One rank's pages between SGLang's pool and the cache: which are restorable, how they come, how they are kept.

The engine asks on its scheduler's thread, between two forwards, so nothing here waits without a bound. A load copies at
once and answers for the bytes; a save is copied beside what the engine does, and told as done when it is.
"""

from __future__ import annotations

import logging
import time
from binascii import unhexlify
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, BlockLease, Placed, Publication, ReservedSlots, SegmentMap
from kvoffload.client import PendingAcquire
from kvoffload.errors import KVOffloadError, NativeError, StorageError
from kvoffload.hash_rows import as_rows, choose_rows
from kvoffload.native import finish_digests
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
MAX_HELD = 256
"""Hits that are leased and not loaded yet."""
HELD_S = 30.0
"""A request that has not come to load what it was told of by then has ended, or asks again."""
MAX_FAULT_LINES = 20
GROUP = 0
NO_MASK = bytes(HASH_BYTES)


class PageCache(Protocol):
    """As `Client` has it; nothing here waits but `wait_for`, within the step's budget."""

    def begin_step(self) -> None: ...
    def memory(self, memory_id: int) -> SegmentMap: ...
    def may_copy(self, held: Placed) -> bool: ...
    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]: ...
    def start_acquire(self, ask: Ask) -> PendingAcquire: ...
    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None: ...
    def cancel(self, pending: PendingAcquire) -> None: ...
    def release(self, lease: BlockLease) -> None: ...
    def ready_slots(self) -> list[int]: ...
    def take(self, group: int, count: int) -> ReservedSlots: ...
    def publish(self, publication: Publication) -> bool: ...
    def abort(self, slots: ReservedSlots) -> None: ...
    def invalidate(self, group: int, hashes: Buffer) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class PageTerms:
    """What one rank is given."""

    page_size: int
    record_bytes: int
    fingerprint: bytes
    """Of its identity; digests are made with it."""
    ranks: int = 1
    """Of the engine. One alone may answer that a load failed: then the engine computes the request."""
    verify_always: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class _Hit:
    """What a request was told of, and what keeps it there."""

    asked: bytes
    names: bytes
    """Of those that it has."""
    lease: BlockLease
    addresses: npt.NDArray[np.uint64]
    digests: npt.NDArray[np.uint64]
    until_s: float


@dataclass(eq=False)
class _Save:
    """Pages that the engine offered at once, and locks until this is told as done."""

    names: bytes = b""
    slots: ReservedSlots | None = None
    ticket: CopyTicket | None = None
    memory: SegmentMap | None = None
    """Stays as long as the copy may write to it."""
    is_whole: bool = False
    """All that was offered is kept, if this copy ends well."""
    result: bool | None = None
    begun_s: float = 0.0
    words: set[bytes] = field(default_factory=set)


class PageLinker:
    """Owned by the scheduler's thread. Ranks of one engine are asked the same in the same order, and whatever they must
    agree in depends on that alone: every offer is accepted, and in an engine of several ranks every load."""

    def __init__(
        self,
        terms: PageTerms,
        cache: PageCache,
        engine: CopyEngine,
        *,
        mask: bytes = NO_MASK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`mask`: of the weights; what was saved under one is never found under another."""
        self.terms = terms
        self.cache = cache
        self.mask = mask
        self._engine: CopyEngine | None = engine
        self._clock = clock
        self._hits: dict[str, _Hit] = {}
        """By request, the one that was told longest ago first."""
        self._loaded: dict[str, bool] = {}
        """By request that waits for its forward: whether its bytes are there."""
        self._saves: deque[_Save] = deque()
        """In the order in which they were offered, until they are told as done."""
        self._copies: dict[CopyTicket, _Save] = {}
        self._ended: dict[CopyTicket, FinishedCopy] = {}
        self._under_way: set[bytes] = set()
        self._forgotten: set[bytes] = set()
        """Told to be invalid; the index may show them still when the engine offers them anew."""
        self.faults = 0
        self.is_distrusted = False
        """Pages of the engine's cache may be of other weights than those that names stand for."""

    # ---- loads ----

    def lookup(self, rid: str, keys: Sequence[str]) -> list[int]:
        """Every number of pages, from the first on, that is held for this request from here on."""
        self._drop_old_hits()
        if self._engine is None or self.is_distrusted or not keys:
            self._drop_hit(rid)
            return []
        names, page = self._name(keys), self.terms.page_size
        former = self._hits.get(rid)
        if former is not None and self._is_still_longest(former, names):
            # A request that waits for room is looked up in every step.
            self._hits[rid] = replace(self._hits.pop(rid), until_s=self._clock() + HELD_S)
            return list(range(1, len(former.addresses) + 1))
        self._drop_hit(rid)
        pending = self.cache.start_acquire(Ask(names, alignment=page, shards=(0,) if self.terms.verify_always else ()))
        found = self.cache.wait_for(pending)
        if found is None:
            self.cache.cancel(pending)
            return []
        if found.lease is None:
            return []
        (group,) = found.groups
        if not self.cache.may_copy(found.lease):
            self.cache.release(found.lease)
            return []
        pages = found.boundary // page
        self._hits[rid] = _Hit(
            asked=names,
            names=names[: pages * HASH_BYTES],
            lease=found.lease,
            addresses=group.addresses,
            digests=group.digests,
            until_s=self._clock() + HELD_S,
        )
        return list(range(1, pages + 1))

    def load(self, rid: str, keys: Sequence[str], rows: npt.NDArray[np.int64]) -> bool:
        """Copies what `lookup` has told of into these rows of the pool. False: nothing was, compute it.

        NativeError: a copy does not end, so that the rows cannot be given to anybody else; the engine must end.
        """
        hit = self._hits.pop(rid, None)
        fault = "its lease is over" if hit is None else self._copy_hit(hit, keys, rows)
        if hit is not None:
            self.cache.release(hit.lease)
        if fault:
            self.note_line(f"load of request {rid} failed", fault)
        if fault and self.terms.ranks == 1:
            return False
        self._loaded[rid] = not fault
        return True

    def take_loaded(self) -> tuple[bool, ...]:
        """Of each load since the last call whether its bytes are there. The forward that reads them begins."""
        loaded, self._loaded = self._loaded, {}
        return tuple(loaded.values())

    def cancel_load(self, rid: str) -> bool:
        """The request has ended before its forward. False: there was no load of it."""
        self._drop_hit(rid)
        return self._loaded.pop(rid, None) is not None

    # ---- saves ----

    def begin_step(self) -> None:
        """The engine's loop begins anew, with or without requests: slots are asked for before a save needs them."""
        self.cache.begin_step()
        self.cache.ready_slots()

    def offload(self, keys: Sequence[str], rows: npt.NDArray[np.int64]) -> None:
        """Keeps what is not kept yet, as far as there is room. The pages stay as they are until it is told as done."""
        save = _Save(result=False, begun_s=self._clock())
        self._saves.append(save)
        try:
            self._begin_save(save, self._name(keys), rows)
        except Exception as fault:  # noqa: BLE001  (an offer that is never told as done keeps its pages for ever)
            if save.slots is not None and save.ticket is None:
                self.cache.abort(save.slots)
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
        """Whether all pages of the first of them are kept."""
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
        for rid in list(self._hits):
            self._drop_hit(rid)
        self.mask, self.is_distrusted = mask, False

    def distrust(self, why: str = "the weights changed and the cache was not flushed") -> None:
        """The weights are others, and the engine has kept its cache: until it empties it, nothing is saved or found."""
        if not self.is_distrusted:
            self.is_distrusted = True
            self.note_line("pages are neither saved nor restored", why)

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
        return (np.frombuffer(names, np.uint64).reshape(len(keys), -1) ^ np.frombuffer(self.mask, np.uint64)).tobytes()

    def _find_pages(self, rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
        """The engine names every row; pages are whole and lie in order."""
        page = self.terms.page_size
        if len(rows) != count * page:
            raise StorageError(f"{len(rows)} rows for {count} pages of {page}", remedy="")
        pages = rows[::page] // page
        if not np.array_equal(rows, (pages[:, None] * page + np.arange(page)).reshape(-1)):
            raise StorageError("the rows of a page do not follow each other", remedy="")
        return pages

    def _copy_hit(self, hit: _Hit, keys: Sequence[str], rows: npt.NDArray[np.int64]) -> str:
        """What went wrong; empty: every byte is where it belongs. NativeError: nobody knows when the copy ends."""
        try:
            names = self._name(keys)
            ticket = self._begin_load(hit, names, rows)
        except (KVOffloadError, ValueError) as fault:
            return str(fault)
        assert self._engine is not None
        if not self._engine.fence(LOAD_WAIT_S):
            self._close_engine()
        self._collect()
        finished = self._ended.pop(ticket, None)
        if finished is None:
            raise NativeError(f"a copy to {len(keys)} pages did not end in {LOAD_WAIT_S:.0f} s")
        if finished.fault or finished.digests is None:
            return finished.fault
        wrong = self._find_wrong(finished, names, hit.digests[0][: len(keys)])
        if not wrong.any():
            return ""
        # Whoever asks again computes it.
        forgotten = choose_rows(names, wrong)
        self.cache.invalidate(GROUP, forgotten)
        # Those of one request at most: it is computed next.
        self._forgotten = {name.tobytes() for name in as_rows(forgotten)}
        return f"{int(wrong.sum())} of {len(keys)} records are not what was saved"

    def _begin_load(self, hit: _Hit, names: bytes, rows: npt.NDArray[np.int64]) -> CopyTicket:
        count = len(names) // HASH_BYTES
        if not names or hit.names[: len(names)] != names:
            raise StorageError("it asks for other pages than it was told of", remedy="")
        if self._engine is None or not self.cache.may_copy(hit.lease):
            raise StorageError("the memory of its records cannot be copied from any more", remedy="")
        items = self._items(
            self.cache.memory(hit.lease.memory_id), self._find_pages(rows, count), hit.addresses[:count]
        )
        return self._engine.submit(CopyDirection.LOAD, items, has_digests=self.terms.verify_always)

    def _items(self, memory: SegmentMap, pages: npt.NDArray[np.int64], addresses: npt.NDArray[np.uint64]) -> CopyItems:
        slots = memory.pointers(addresses, self.terms.record_bytes)
        return CopyItems(group=np.full(len(pages), GROUP, np.int64), block=pages, slot=slots)

    def _digest(self, finished: FinishedCopy, names: bytes) -> npt.NDArray[np.uint64]:
        assert finished.digests is not None
        made = finish_digests(
            finished.digests.tobytes(),
            self.terms.record_bytes,
            fingerprint=self.terms.fingerprint,
            block_hashes=names,
            group=GROUP,
            shard=0,
        )
        return np.frombuffer(made, np.uint64)

    def _find_wrong(
        self, finished: FinishedCopy, names: bytes, wanted: npt.NDArray[np.uint64]
    ) -> npt.NDArray[np.bool_]:
        """0: nobody has made a digest of this record yet."""
        wrong: npt.NDArray[np.bool_] = (self._digest(finished, names) != wanted) & (wanted != 0)
        return wrong

    def _begin_save(self, save: _Save, names: bytes, rows: npt.NDArray[np.int64]) -> None:
        if self.is_distrusted:
            return
        rows_of_names = as_rows(names)
        pages = self._find_pages(rows, len(rows_of_names))
        forgotten = np.array([name.tobytes() in self._forgotten for name in rows_of_names], np.bool_)
        missing = ~self.cache.lookup(GROUP, names) | forgotten
        under_way = np.array([name.tobytes() in self._under_way for name in rows_of_names], np.bool_)
        chosen = np.flatnonzero(missing & ~under_way)
        if not len(chosen) or self._engine is None:
            save.result = not missing.any()
            return
        slots = save.slots = self.cache.take(GROUP, len(chosen))
        count = len(slots)
        if not count:
            return
        if not self.cache.may_copy(slots):
            raise StorageError("the memory of its slots is not mapped here", remedy="")
        chosen = chosen[:count]
        save.is_whole = count == int((missing & ~under_way).sum()) and not (missing & under_way).any()
        save.names = choose_rows(names, chosen)
        save.memory = self.cache.memory(slots.memory_id)
        save.ticket = self._engine.submit(
            CopyDirection.SAVE, self._items(save.memory, pages[chosen], slots.addresses), has_digests=True
        )
        save.result = None
        save.words = {name.tobytes() for name in as_rows(save.names)}
        self._under_way |= save.words
        self._forgotten -= save.words
        self._copies[save.ticket] = save

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
        assert save.slots is not None
        self._under_way -= save.words
        if save.result is not None or finished.fault:
            # It was given up meanwhile, or it failed: nobody may read these slots.
            self.cache.abort(save.slots)
            if finished.fault:
                self.note_line("a save failed", finished.fault)
            save.result = False
        else:
            digests = self._digest(finished, save.names)
            is_told = self.cache.publish(Publication(save.slots, hashes=save.names, digests=digests))
            save.result = is_told and save.is_whole
        save.memory = save.slots = None

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

    def _is_still_longest(self, hit: _Hit, names: bytes) -> bool:
        """Nothing has come meanwhile that would make it longer."""
        if hit.asked != names or not self.cache.may_copy(hit.lease):
            return False
        following = names[len(hit.names) :][:HASH_BYTES]
        return not following or not self.cache.lookup(GROUP, following).any()

    def _drop_hit(self, rid: str) -> None:
        hit = self._hits.pop(rid, None)
        if hit is not None:
            self.cache.release(hit.lease)

    def _drop_old_hits(self) -> None:
        now_s = self._clock()
        while self._hits:
            rid, hit = next(iter(self._hits.items()))
            if len(self._hits) < MAX_HELD and now_s < hit.until_s:
                return
            self._drop_hit(rid)

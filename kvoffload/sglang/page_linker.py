"""One rank's pages between SGLang's pool and the cache: finds restorable pages, loads them, and saves new ones.

The engine asks on its scheduler's thread, between two forwards, so nothing here waits without a bound. A load copies at
once and answers for the bytes. A save is copied while the engine goes on, and told as done when it is.
"""

from __future__ import annotations

import logging
import time
from binascii import unhexlify
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import ReservedSlots
from kvoffload.client import Client
from kvoffload.engines.record_mover import RecordDigests, RecordMover, Records
from kvoffload.errors import KVOffloadError, NativeError, StorageError
from kvoffload.hash_rows import as_rows, choose_rows
from kvoffload.sglang.hit_table import Hit, HitTable
from kvoffload.sglang.linker_metrics import LinkerMetrics
from kvoffload.sglang.page_settings import FULL, PageSettings
from kvoffload.transfer import CopyEngine
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


@dataclass(eq=False)
class _Save:
    """Pages that the engine offered at once, and locks until this is told as done."""

    parts: list[Records] = field(default_factory=list)
    slots: list[ReservedSlots] = field(default_factory=list)
    """The slots of each part, until its copy has begun."""
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
        metrics: LinkerMetrics | None = None,
    ) -> None:
        """`mask`: of the weights; what was saved under one is never found under another. `metrics`: None if the engine
        has none."""
        self.settings = settings
        self.cache = cache
        self.mask = mask
        digests = RecordDigests(settings.fingerprint, [group.record_bytes for group in settings.groups])
        self._mover: RecordMover[_Save | None] | None = RecordMover(cache, engine, digests)
        self._clock = clock
        self._metrics = metrics
        self._hits = HitTable(settings, cache, clock=clock, metrics=metrics)
        self._loaded: dict[str, bool] = {}
        """Whether a load's bytes are there, for each request that waits for its forward."""
        self._saves: deque[_Save] = deque()
        """In the order in which they were offered, until they are told as done."""
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
        if self._mover is None or self.is_distrusted or not keys:
            self._hits.drop(rid)
            return []
        return self._hits.find(rid, self._name(keys), is_counted=is_counted)

    def load(self, rid: str, parts: Sequence[GroupRows]) -> bool:
        """Copies the pages that `lookup` found into these rows of the pools. False: the load failed, and the engine
        computes them. An engine with several ranks learns of a failure by `take_loaded` instead.

        NativeError: a copy does not end, so that the rows cannot be given to another request; the engine must end.
        """
        hit, begun_s = self._hits.take(rid), self._clock()
        fault = "its lease is over" if hit is None else self._copy_hit(hit, parts)
        if hit is not None:
            self._hits.release(hit)
        self._hits.prompts.end(rid, is_loaded=not fault)
        if fault:
            self.note_line(f"load of request {rid} failed", fault, counts="kvoffload_failed_loads_total")
        elif self._metrics is not None:
            copied = sum(len(part.keys) * self.settings.groups[part.group].record_bytes for part in parts)
            self._metrics.count_load(copied, self._clock() - begun_s)
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
        if self._metrics is not None:
            self._metrics.set("kvoffload_server_up", int(self.cache.is_served))

    def offload(self, parts: Sequence[GroupRows]) -> None:
        """Keeps what is not kept yet, as far as there is room. The pages stay as they are until it is told as done."""
        save = _Save(result=False, begun_s=self._clock())
        self._saves.append(save)
        try:
            self._begin_save(save, parts)
        except Exception as fault:  # noqa: BLE001  (an offer that is never told as done keeps its pages for ever)
            for slots in save.slots:
                self.cache.abort(slots)
            save.result = False
            why = str(fault) or type(fault).__name__
            self.note_line("a save failed", why, counts="kvoffload_failed_saves_total")

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
        if self._mover is not None and self._under_way:
            self._mover.engine.fence(RESET_WAIT_S)
            self._collect()
        for save in self._saves:
            if save.result is None:
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
            self._close_mover()
        except NativeError:
            return False
        return True

    def close(self) -> None:
        """Gives back what is held; nothing is restorable any more."""
        self.reset(self.mask)
        self._hits.close()
        self._close_mover()
        self.cache.close()

    def note_fault(self, hook: str, fault: Exception) -> None:
        if self._metrics is not None:
            self._metrics.count("kvoffload_faults_total", 1, hook)
        self.note_line(f"{hook} failed", str(fault) or type(fault).__name__)

    def note_line(self, what: str, why: str, *, counts: str = "") -> None:
        """Logs a fault, until there were too many. `counts`: name of the metric that it adds one to."""
        self.faults += 1
        if counts and self._metrics is not None:
            self._metrics.count(counts)
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

    def _copy_hit(self, hit: Hit, offered: Sequence[GroupRows]) -> str:
        """Loads a hit. Returns the fault; empty: every byte is where it belongs. NativeError: it is unknown when the
        copy ends."""
        try:
            parts = self._choose_held(hit, offered)
            assert self._mover is not None
            move = self._mover.begin(None, parts)
        except (KVOffloadError, ValueError) as fault:
            return str(fault)
        if not self._mover.engine.fence(LOAD_WAIT_S):
            self._close_mover()
        self._collect()
        count, wrong = sum(len(part.blocks) for part in parts), sum(map(len, move.wrong))
        if move.fault is None:
            raise NativeError(f"a copy to {count} pages did not end in {LOAD_WAIT_S:.0f} s")
        if not wrong:
            return move.fault
        # Those of one request at most: it is computed next.
        self._forgotten = {
            (part.group, name.tobytes())
            for part, places in zip(parts, move.wrong, strict=True)
            for name in as_rows(part.names)[places]
        }
        return f"{wrong} of {count} records differ from the saved bytes"

    def _choose_held(self, hit: Hit, parts: Sequence[GroupRows]) -> list[Records]:
        """StorageError: the engine wants other pages than it was told of."""
        if sorted(part.group for part in parts) != list(range(len(self.settings.groups))):
            raise StorageError(f"it asks for groups {[part.group for part in parts]}", remedy="")
        if self._mover is None or not all(self.cache.may_copy(lease) for lease in hit.leases):
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
            digests = held.digests[first:length] if self.settings.verify_always else None
            place = (hit.leases[0].memory_id, held.addresses[first:length])
            chosen.append(Records(names, self._find_pages(part), part.group, *place, digests))
        return chosen

    def _begin_save(self, save: _Save, parts: Sequence[GroupRows]) -> None:
        if self.is_distrusted or self._mover is None:
            return
        for part in parts:
            self._take_slots(save, part)
        if not save.parts:
            save.result = save.is_whole
            return
        # Windows are published before the pages that they belong to: a reader that finds all pages finds their windows
        # too.
        self._mover.begin(save, save.parts[::-1], save.slots[::-1])
        save.result, save.slots = None, []
        save.words = {(part.group, name.tobytes()) for part in save.parts for name in as_rows(part.names)}
        self._under_way |= save.words
        self._forgotten -= save.words

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
        if self._metrics is not None:
            self._metrics.count("kvoffload_dropped_saves_total", len(wanted) - len(slots), "no_slot")
        if not len(slots):
            return
        wanted = wanted[: len(slots)]
        save.slots.append(slots)
        place = (slots.group, slots.memory_id, slots.addresses)
        save.parts.append(Records(choose_rows(names, wanted), pages[wanted], *place))
        if not self.cache.may_copy(slots):
            raise StorageError("the memory of its slots is not mapped here", remedy="")

    def _collect(self) -> None:
        if self._mover is None:
            return
        # No engine may read the slots of a save that was given up meanwhile.
        for move in self._mover.poll(lambda save: save is not None and save.result is None):
            save = move.job
            if save is None:
                continue
            self._under_way -= save.words
            if move.fault:
                self.note_line("a save failed", move.fault, counts="kvoffload_failed_saves_total")
            elif self._metrics is not None and save.result is None:
                copied = sum(len(part.blocks) * self.settings.groups[part.group].record_bytes for part in move.parts)
                self._metrics.count_save(copied, self._clock() - save.begun_s)
            save.result = move.is_published and save.is_whole

    def _give_up_late(self) -> None:
        now_s = self._clock()
        for save in self._saves:
            if save.result is not None:
                continue
            if now_s - save.begun_s < SAVE_WAIT_S:
                return
            why = f"its copy has not ended in {SAVE_WAIT_S:.0f} s"
            self.note_line("a save is given up", why, counts="kvoffload_failed_saves_total")
            save.result = False

    def _close_mover(self) -> None:
        """NativeError: a copy still runs."""
        if self._mover is None:
            return
        self._mover.engine.close()
        self._collect()
        self._mover = None

"""Codes the records of a remote tier on their way to its store, or of a server on their way to a peer, and measures
the speeds by which it chooses the records."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from kvoffload import native
from kvoffload.tiers.coding_choice import KNOWN_BYTES, CodingChoice
from kvoffload.tiers.record_store import Value

FAILURE_LIMIT = 16
"""Number of records of a group in a row that do not become shorter, after which most are not tried."""
SKIPS = 255
"""Number of records of such a group that are not tried, for one that is."""
_LEARNING = 0.1
"""Weight of the newest record in a group's ratio."""
_FIRST_RATIO = 1.5
GROUPS = 64


class Coding(StrEnum):
    """The choice of records that are coded on their way to a tier. Coded records there are read in any case."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


@dataclass
class _Busy:
    """Measures for how long at least one connection did something."""

    connections: int = 0
    since_s: float = 0.0
    """When the first of them began, or when the time was taken."""
    plain_bytes: int = 0
    """Bytes of plain records since `since_s`; `coded_bytes` likewise."""
    coded_bytes: int = 0

    def begin(self, now_s: float) -> None:
        self.since_s = self.since_s if self.connections else now_s
        self.connections += 1

    def end(self, now_s: float) -> tuple[int, int, float] | None:
        """Returns what was done and the seconds it took: once all have ended, or much was done. None: not yet."""
        self.connections -= 1
        if self.connections and self.plain_bytes + self.coded_bytes < KNOWN_BYTES:
            return None
        done = self.plain_bytes, self.coded_bytes, now_s - self.since_s
        self.plain_bytes, self.coded_bytes, self.since_s = 0, 0, now_s
        return done


@dataclass
class _Group:
    ratio: float = _FIRST_RATIO
    failures: int = 0
    skipped: int = 0

    def takes(self) -> bool:
        """Whether to try a record. After records that did not become shorter, few are tried: later ones may again."""
        if self.failures >= FAILURE_LIMIT and self.skipped < SKIPS:
            self.skipped += 1
            return False
        self.skipped = 0
        return True


class RecordCoder:
    """Codes records for all threads of one tier. One record is coded at a time, in a thread of a low priority, so that
    coding never takes more than one core, and this only where nothing else needs it."""

    def __init__(
        self,
        coding: Coding = Coding.OFF,
        *,
        encoder: native.BackgroundEncoder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`encoder`: one that other coders have, too, so that all of them together take one core at most."""
        self.keys: native.SealKeys | None = None
        """The keys that seal the tier's records, or None if they are not sealed. Set before the first record."""
        self._coding = coding
        self._clock = clock
        self._encoder = encoder or native.BackgroundEncoder()
        self._turn = threading.Lock()
        """Held by the thread that codes."""
        self._lock = threading.Lock()
        self._choice = CodingChoice()
        self._groups: defaultdict[int, _Group] = defaultdict(_Group)
        self._sending, self._reading = _Busy(), _Busy()
        self._counts: Counter[str] = Counter()
        self._came_ratio = _FIRST_RATIO
        """Ratio of records that peers have coded for this server."""

    @property
    def is_off(self) -> bool:
        return self._coding is Coding.OFF

    def encode(self, group: int, record: Value, *, is_wanted: bool = False) -> bytes | None:
        """Codes a record. None: send it as it is. `is_wanted`: the receiver has asked for it coded, or `gives` has said
        so."""
        if self._coding is Coding.OFF:
            return None
        chooses, choice = self._coding is Coding.AUTO and not is_wanted, self._choice
        with self._lock:
            found = self._groups[group % GROUPS]
            if (chooses and not choice.wants(len(record), found.ratio)) or not found.takes():
                return None
            needs_trial = chooses and not (choice.decoding.is_known and choice.comes_sooner(found.ratio))
        with self._turn:
            begun_s = self._clock()
            coded = self._encoder.encode(record)
            encoded_s = self._clock()
            if coded is not None and needs_trial:
                native.decode_record(coded, bytearray(len(record)))
            decoded_s = self._clock()
        with self._lock:
            choice.encoding.add(len(record), encoded_s - begun_s)
            if coded is None:
                found.failures = min(found.failures + 1, FAILURE_LIMIT)
                found.ratio += _LEARNING * (1 - found.ratio)
                return None
            found.failures = 0
            found.ratio += _LEARNING * (len(record) / len(coded) - found.ratio)
            if needs_trial:
                choice.decoding.add(len(record), decoded_s - encoded_s)
            self._count(1, len(record), len(coded))
        return coded

    def asks(self, size_bytes: int) -> bool:
        """Whether to ask a peer to code records of so many bytes for this server."""
        if self._coding is not Coding.AUTO:
            return self._coding is Coding.ON
        with self._lock:
            return self._choice.asks(size_bytes, self._came_ratio)

    def gives(self, size_bytes: int) -> bool:
        """Whether to code records of so many bytes for a peer that decodes them at once."""
        if self._coding is not Coding.AUTO:
            return self._coding is Coding.ON
        with self._lock:
            return self._choice.gives(size_bytes)

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Measures a connection's sending. Within it the thread does nothing else."""
        with self._doing(self._sending):
            yield

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Measures a connection's reading: it reads, verifies and decodes records, all that their reader waits for."""
        with self._doing(self._reading):
            yield

    def told_sent(self, size_bytes: int) -> None:
        """Takes the number of bytes that travelled. Call it within `sending`."""
        with self._lock:
            self._sending.plain_bytes += size_bytes

    def told_read(self, record_bytes: int, *, decoding_s: float | None = None) -> None:
        """Takes the bytes of a record that was read, and for a coded one the time of decoding. Call it within
        `reading`."""
        with self._lock:
            if decoding_s is None:
                self._reading.plain_bytes += record_bytes
            else:
                self._reading.coded_bytes += record_bytes
                self._choice.decoding.add(record_bytes, decoding_s)

    def told_late(self, record_bytes: int, *, taken_s: float) -> None:
        """Takes the bytes of records that were asked for coded and had not come after `taken_s`, when their reader gave
        up. Call it within `reading`. They had only a share of the link: other connections read meanwhile."""
        with self._lock:
            self._choice.told_late(record_bytes * max(self._reading.connections, 1), taken_s)

    def told_waiting(self, jobs: int, connections: int) -> None:
        """Takes the number of jobs that wait to be sent when a connection takes the next one. Sending is behind once
        each connection could have had one more, until none waits."""
        with self._lock:
            self._choice.is_behind = jobs >= connections or (self._choice.is_behind and jobs > 0)

    def told_came(self, records: int, *, record_bytes: int, coded_bytes: int, taken_s: float) -> None:
        """Takes the number of records that a peer has coded for this server, and their bytes before and after. Call it
        within `reading`. They count like those that are coded here."""
        self.told_read(record_bytes, decoding_s=taken_s)
        with self._lock:
            self._came_ratio += _LEARNING * (record_bytes / coded_bytes - self._came_ratio)
            self._count(records, record_bytes, coded_bytes)

    @property
    def counts(self) -> dict[str, int]:
        """The number of records that were coded, and their bytes before and after."""
        with self._lock:
            return dict(self._counts)

    @contextmanager
    def _doing(self, what: _Busy) -> Iterator[None]:
        if self._coding is not Coding.AUTO:
            yield
            return
        with self._lock:
            what.begin(self._clock())
        try:
            yield
        finally:
            with self._lock:
                done = what.end(self._clock())
                if done is not None and what is self._reading:
                    self._choice.told_read(*done)
                elif done is not None:
                    self._choice.sending.add(done[0], done[2])

    def _count(self, records: int, record_bytes: int, coded_bytes: int) -> None:
        self._counts["coded_records"] += records
        self._counts["coded_bytes"] += record_bytes
        self._counts["coded_stored_bytes"] += coded_bytes

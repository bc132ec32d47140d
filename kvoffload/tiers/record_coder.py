"""Which records a remote tier codes on their way to its store, by what the store and the code were measured to take."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from kvoffload import native
from kvoffload.tiers.record_store import Value
from kvoffload.units import MIB

FAILURE_LIMIT = 16
"""Records of a group in a row that do not become shorter."""
SKIPS = 255
"""Records of such a group that are not tried, for one that is."""
KNOWN_BYTES = 16 * MIB
"""What must have been moved before its speed counts."""
_FORGET_BYTES = 256 * MIB
_LEARNING = 0.1
"""How much of what a group's ratio is said to be the newest record decides."""
_FIRST_RATIO = 1.5
_MARGIN = 0.9
"""Of the speed at which coding would gain nothing."""
_GROUPS = 64


class Coding(StrEnum):
    """Which records are coded on their way to a tier; those that are there are read in any case."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


@dataclass
class Speed:
    """Of one thread, in the mean of all; what is long past counts less."""

    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, size_bytes: int, taken_s: float) -> None:
        if self.bytes > _FORGET_BYTES:
            self.bytes /= 2
            self.seconds /= 2
        self.bytes += size_bytes
        self.seconds += taken_s

    @property
    def rate(self) -> float:
        """Bytes a second; 0 if unknown."""
        return self.bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def is_known(self) -> bool:
        return self.bytes >= KNOWN_BYTES


@dataclass
class _Group:
    ratio: float = _FIRST_RATIO
    failures: int = 0
    skipped: int = 0


class RecordCoder:
    """For all threads of one tier. One record is coded at a time, so that coding never takes more than one core."""

    def __init__(self, coding: Coding = Coding.OFF, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._coding = coding
        self._clock = clock
        self._encoder = native.RecordEncoder()
        self._lock = threading.Lock()
        self._groups: defaultdict[int, _Group] = defaultdict(_Group)
        self._sent, self._read = Speed(), Speed()
        """Of the store: bytes as they travel."""
        self._encoded, self._decoded = Speed(), Speed()
        """Of the code: bytes of records."""
        self._counts: Counter[str] = Counter()

    def encode(self, group: int, record: Value) -> bytes | None:
        """None: it is to be sent as it is."""
        if self._coding is Coding.OFF:
            return None
        with self._lock:
            if not self._wants(self._group(group)):
                return None
            needs_trial = self._coding is Coding.AUTO and not self._decoded.bytes
        begun_s = self._clock()
        coded = self._encoder.encode(record)
        encoded_s = self._clock()
        if coded is not None and needs_trial:
            native.decode_record(coded, bytearray(len(record)))
        decoded_s = self._clock()
        with self._lock:
            found = self._group(group)
            self._encoded.add(len(record), encoded_s - begun_s)
            if coded is None:
                found.failures = min(found.failures + 1, FAILURE_LIMIT)
                found.ratio += _LEARNING * (1 - found.ratio)
                return None
            found.failures = 0
            found.ratio += _LEARNING * (len(record) / len(coded) - found.ratio)
            if needs_trial:
                self._decoded.add(len(record), decoded_s - encoded_s)
            self._counts["coded_records"] += 1
            self._counts["coded_bytes"] += len(record)
            self._counts["coded_stored_bytes"] += len(coded)
        return coded

    def told_sent(self, size_bytes: int, taken_s: float) -> None:
        """How long a connection took for what it has sent, without what else its thread did."""
        self._note(self._sent, size_bytes, taken_s)

    def told_read(self, size_bytes: int, taken_s: float) -> None:
        self._note(self._read, size_bytes, taken_s)

    def told_decoded(self, record_bytes: int, taken_s: float) -> None:
        self._note(self._decoded, record_bytes, taken_s)

    @property
    def counts(self) -> dict[str, int]:
        """Of records that were coded: how many, their bytes before and after."""
        with self._lock:
            return dict(self._counts)

    def _note(self, speed: Speed, size_bytes: int, taken_s: float) -> None:
        if self._coding is Coding.AUTO:
            with self._lock:
                speed.add(size_bytes, taken_s)

    def _group(self, number: int) -> _Group:
        return self._groups[number % _GROUPS]

    def _wants(self, group: _Group) -> bool:
        if self._coding is Coding.AUTO and not self._is_faster(group.ratio):
            return False
        if group.failures >= FAILURE_LIMIT and group.skipped < SKIPS:
            group.skipped += 1
            return False
        group.skipped = 0
        return True

    def _is_faster(self, ratio: float) -> bool:
        """A byte of a record takes 1 / link, or 1 / (ratio * link) and then 1 / code: both ways, as far as both are
        known. Before the code's speed is known it takes a trial."""
        ways = [(self._sent, self._encoded), (self._read, self._decoded)]
        known = [(link.rate, code.rate) for link, code in ways if link.is_known]
        return bool(known) and all(code == 0 or link < _MARGIN * code * (1 - 1 / ratio) for link, code in known)

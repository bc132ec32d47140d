"""Which records a remote tier codes on their way to its store, or a server on their way to a peer, by what the way and
the code were measured to take."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from kvoffload import native
from kvoffload.tiers.record_store import Value
from kvoffload.units import MIB

FAILURE_LIMIT = 16
"""Records of a group in a row that do not become shorter."""
SKIPS = 255
"""Records of such a group that are not tried, for one that is."""
SLOW_SKIPS = 63
"""The same where coding is measured to be too slow: that may have been other work of the machine."""
AGAIN = 8
"""Records or requests after which a trial is due again that the other side has not taken."""
KNOWN_BYTES = 16 * MIB
"""What must have been moved, or coded, before its speed counts."""
_FORGET_BYTES = 2 * KNOWN_BYTES
"""So many bytes are worth half when more come."""
_LEARNING = 0.1
"""How much of what a group's ratio is said to be the newest record decides."""
_FIRST_RATIO = 1.5
_MARGIN = 0.9
"""Of the speed at which reading would gain nothing by it."""
_SEND_MARGIN = 0.5
"""Of the code's speed: one record is sent while the next one is coded."""
GROUPS = 64


class Coding(StrEnum):
    """Which records are coded on their way to a tier; those that are there are read in any case."""

    OFF = "off"
    ON = "on"
    AUTO = "auto"


class Way(Enum):
    SEND = "send"
    READ = "read"


@dataclass
class Speed:
    """Is a moving estimate of a speed: what is long past counts less."""

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
class _Way:
    """What is known of one direction."""

    link: Speed = field(default_factory=Speed)
    """Of all connections together, in bytes as they travel."""
    code: Speed = field(default_factory=Speed)
    """Of one thread, in bytes of records."""
    moving: int = 0
    """Connections that move something now."""
    since_s: float = 0.0
    """When the first of them began."""


@dataclass
class _Group:
    ratio: float = _FIRST_RATIO
    failures: int = 0
    skipped: int = 0


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
        self._coding = coding
        self._clock = clock
        self._encoder = encoder or native.BackgroundEncoder()
        self._turn = threading.Lock()
        """Has who codes."""
        self._lock = threading.Lock()
        self._groups: defaultdict[int, _Group] = defaultdict(_Group)
        self._ways = {way: _Way() for way in Way}
        self._counts: Counter[str] = Counter()
        self._came_ratio = _FIRST_RATIO
        self._skipped = 0
        """Requests in which nobody was asked to code, since something came coded."""

    def wants(self, group: int) -> bool:
        """Says whether a group's next record is one to code, if the other side takes it so."""
        if self._coding is Coding.OFF:
            return False
        with self._lock:
            found = self._group(group)
            return self._takes(found, is_faster=self._may_gain(found), again=AGAIN)

    def encode(self, group: int, record: Value, *, is_wanted: bool = False) -> bytes | None:
        """Codes a record. None: it is to be sent as it is. `is_wanted`: `wants` has said so."""
        if self._coding is Coding.OFF:
            return None
        with self._lock:
            found = self._group(group)
            is_faster = self._may_gain(found)
            if is_wanted:
                found.skipped = 0
            elif not self._takes(found, is_faster=is_faster):
                return None
            read = self._ways[Way.READ]
            needs_trial = self._coding is Coding.AUTO and not (is_faster and read.code.is_known)
        with self._turn:
            begun_s = self._clock()
            coded = self._encoder.encode(record)
            encoded_s = self._clock()
            if coded is not None and needs_trial:
                native.decode_record(coded, bytearray(len(record)))
            decoded_s = self._clock()
        with self._lock:
            self._ways[Way.SEND].code.add(len(record), encoded_s - begun_s)
            if coded is None:
                found.failures = min(found.failures + 1, FAILURE_LIMIT)
                found.ratio += _LEARNING * (1 - found.ratio)
                return None
            found.failures = 0
            found.ratio += _LEARNING * (len(record) / len(coded) - found.ratio)
            if needs_trial:
                read.code.add(len(record), decoded_s - encoded_s)
            self._count(1, len(record), len(coded))
        return coded

    def asks(self) -> bool:
        """Says whether to ask somebody who can code for us: he knows how fast he codes, we how fast his records come
        and are decoded."""
        if self._coding is not Coding.AUTO:
            return self._coding is Coding.ON
        with self._lock:
            if self._reads_faster(self._ways[Way.READ].link, self._came_ratio):
                return True
            self._skipped += 1
            if self._skipped <= SLOW_SKIPS:
                return False
            self._skipped -= AGAIN
            return True

    @contextmanager
    def moving(self, way: Way) -> Iterator[None]:
        """Within it a connection sends or reads, and its thread does nothing else."""
        if self._coding is not Coding.AUTO:
            yield
            return
        one = self._ways[way]
        with self._lock:
            one.since_s = one.since_s if one.moving else self._clock()
            one.moving += 1
        try:
            yield
        finally:
            with self._lock:
                one.moving -= 1
                if not one.moving:
                    one.link.add(0, self._clock() - one.since_s)

    def told_moved(self, way: Way, size_bytes: int) -> None:
        """Is told that so many bytes moved, while something was `moving`."""
        with self._lock:
            self._ways[way].link.add(size_bytes, 0.0)

    def told_decoded(self, record_bytes: int, taken_s: float) -> None:
        with self._lock:
            self._ways[Way.READ].code.add(record_bytes, taken_s)

    def told_came(self, records: int, *, record_bytes: int, coded_bytes: int, taken_s: float) -> None:
        """Is told that somebody has coded so many records for us, with the bytes of all of them before and after. They
        count as those that are coded here."""
        with self._lock:
            self._skipped = 0
            self._ways[Way.READ].code.add(record_bytes, taken_s)
            self._came_ratio += _LEARNING * (record_bytes / coded_bytes - self._came_ratio)
            self._count(records, record_bytes, coded_bytes)

    @property
    def counts(self) -> dict[str, int]:
        """What was counted of records that were coded: how many, their bytes before and after."""
        with self._lock:
            return dict(self._counts)

    def _count(self, records: int, record_bytes: int, coded_bytes: int) -> None:
        self._counts["coded_records"] += records
        self._counts["coded_bytes"] += record_bytes
        self._counts["coded_stored_bytes"] += coded_bytes

    def _group(self, number: int) -> _Group:
        return self._groups[number % GROUPS]

    def _may_gain(self, group: _Group) -> bool:
        return self._coding is Coding.ON or self._is_faster(group.ratio)

    def _takes(self, group: _Group, *, is_faster: bool, again: int | None = None) -> bool:
        """Says whether a group's record is to be coded. What is of no use is tried rarely: it may have become of
        use. `again`: after so many it is tried anew if it is not coded now."""
        if self._coding is Coding.AUTO and not any(way.link.is_known for way in self._ways.values()):
            return False
        skips = SKIPS if group.failures >= FAILURE_LIMIT else 0 if is_faster else SLOW_SKIPS
        if group.skipped < skips:
            group.skipped += 1
            return False
        group.skipped = 0 if again is None else max(skips - again, 0)
        return True

    def _is_faster(self, ratio: float) -> bool:
        """Whether coding holds up nothing that is sent, and lets records come sooner."""
        send, read = self._ways[Way.SEND], self._ways[Way.READ]
        # Whoever reads what is only sent from here has such a link, too.
        link = read.link if read.link.is_known else send.link
        if send.link.is_known and send.code.is_known and send.link.rate >= _SEND_MARGIN * send.code.rate:
            return False
        return self._reads_faster(link, ratio)

    def _reads_faster(self, link: Speed, ratio: float) -> bool:
        """Whether records come sooner if they are coded: reading a byte of one takes 1 / link, or 1 / (ratio * link)
        and then 1 / code. Before the code's speed is known it takes trials."""
        code = self._ways[Way.READ].code
        return not code.is_known or link.rate < _MARGIN * code.rate * (1 - 1 / ratio)

"""Decides whether coded records come sooner from a store than plain ones, by the measured times of reading both."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.units import MIB

KNOWN_BYTES = 16 * MIB
"""Bytes that must have been moved, or coded, before a speed counts as known."""
TRIAL_BYTES = KNOWN_BYTES
FIRST_TRIAL_BYTES = 16 * TRIAL_BYTES
"""After so many bytes that were sent, TRIAL_BYTES go the other way: the faster way may have been measured at a bad
moment. The next trials come after twice as many, and so on, up to every TRIAL_EVERY_BYTES: speeds may have changed."""
TRIAL_EVERY_BYTES = 128 * TRIAL_BYTES
_FORGET_BYTES = 2 * KNOWN_BYTES
"""Bytes after which a speed's past is halved, when more come."""
_ONE_KIND = 7 / 8
"""Share of a period's bytes that must be coded, or plain, for the period to count for that kind."""
_READ_MARGIN = 1.03
"""Factor by which coded records must come faster than plain ones to be preferred."""
_LATE_TIMES = 4
"""Limit on the time counted for coded records that did not come in time, as a multiple of plain records' time."""
_DECODE_MARGIN = 0.9
"""Usable share of one thread's speed of decoding: records that arrive must not wait for it."""
_SEND_MARGIN = 0.5
"""Share of the speed of encoding: one record is sent while the next one is coded."""


@dataclass
class Speed:
    """A moving estimate of a speed, in which older measurements count less."""

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
class _Trials:
    """Chooses the bytes that are sent the other way, as a trial: the faster way may have changed."""

    sent_bytes: int = 0
    at_bytes: int = FIRST_TRIAL_BYTES

    def take(self, size_bytes: int) -> bool:
        """Counts the next bytes, and returns whether they are a trial."""
        self.sent_bytes += size_bytes
        if self.sent_bytes > self.at_bytes + TRIAL_BYTES:
            self.at_bytes += min(self.at_bytes, TRIAL_EVERY_BYTES)
        return self.sent_bytes > self.at_bytes


class CodingChoice:
    """A planner: callers report measurements to it. It has neither a clock nor a lock."""

    def __init__(self) -> None:
        self.plain = Speed()
        """Speed of reading plain records until they are verified, by all connections together; so is `coded`."""
        self.coded = Speed()
        """Measured in bytes of records, not in bytes that travelled."""
        self.decoding = Speed()
        """Speed of one thread; so is `encoding`."""
        self.encoding = Speed()
        self.sending = Speed()
        """Speed of all connections together, in bytes as they travel."""
        self.is_behind = False
        """Whether records wait to be sent faster than they are sent."""
        self._keeping, self._asking, self._giving = _Trials(), _Trials(), _Trials()

    def told_read(self, plain_bytes: int, coded_bytes: int, taken_s: float) -> None:
        """Takes the bytes of records that were read in a period. A period in which many of both kinds came is
        ignored."""
        size_bytes = plain_bytes + coded_bytes
        if plain_bytes >= _ONE_KIND * size_bytes > 0:
            self.plain.add(size_bytes, taken_s)
        elif coded_bytes >= _ONE_KIND * size_bytes > 0:
            self.coded.add(size_bytes, taken_s)

    def told_late(self, size_bytes: int, taken_s: float) -> None:
        """Takes the bytes of coded records that had not come after `taken_s`, when their reader gave up. If plain ones
        would have come by then, that alone shows how slow coded ones are: further ones may come too late as well,
        and then nothing else is measured."""
        if self.plain.rate * taken_s > size_bytes:
            late_s = min(taken_s / size_bytes, _LATE_TIMES / self.plain.rate)
            self.coded.add(KNOWN_BYTES, KNOWN_BYTES * late_s)

    def wants(self, size_bytes: int, ratio: float) -> bool:
        """Whether to code a record that will be sent; `ratio`: by how much it would become shorter."""
        if not (self.plain.is_known or self.sending.is_known):
            return False
        is_trial = self._keeping.take(size_bytes)
        return not (self.is_behind and self._sends_later()) and self.comes_sooner(ratio) is not is_trial

    def asks(self, size_bytes: int, ratio: float) -> bool:
        """Whether to ask for coded records, where the sender would code them now."""
        return self.plain.is_known and self.comes_sooner(ratio) is not self._asking.take(size_bytes)

    def gives(self, size_bytes: int) -> bool:
        """Whether to code a record for a peer that decodes it at once."""
        return self.sending.is_known and self._sends_later() is self._giving.take(size_bytes)

    def comes_sooner(self, ratio: float) -> bool:
        """Whether a coded record would be read sooner. Before enough of them were read, they are tried if decoding
        would keep up."""
        if self.plain.is_known and self.coded.is_known:
            return self.coded.rate > _READ_MARGIN * self.plain.rate
        # Other servers that read what this one sends have about the same link.
        link = self.plain if self.plain.is_known else self.sending
        return not self.decoding.is_known or ratio * link.rate < _DECODE_MARGIN * self.decoding.rate

    def _sends_later(self) -> bool:
        speeds = (self.sending, self.encoding)
        return all(speed.is_known for speed in speeds) and self.sending.rate >= _SEND_MARGIN * self.encoding.rate

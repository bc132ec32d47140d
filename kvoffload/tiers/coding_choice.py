"""Whether coded records come sooner from a store than plain ones, by what reading both was measured to take."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.units import MIB

KNOWN_BYTES = 16 * MIB
"""What must have been moved, or coded, before its speed counts."""
TRIAL_BYTES = KNOWN_BYTES
FIRST_TRIAL_BYTES = 16 * TRIAL_BYTES
"""After so many bytes that were sent, TRIAL_BYTES go the other way: what is faster may have been measured at a bad
moment. Then after twice as many, and so on, up to every TRIAL_EVERY_BYTES: it may have changed."""
TRIAL_EVERY_BYTES = 128 * TRIAL_BYTES
_FORGET_BYTES = 2 * KNOWN_BYTES
"""So many bytes are worth half when more come."""
_ONE_KIND = 7 / 8
"""Of a period's bytes: what was read in it is taken for all coded, or all plain."""
_READ_MARGIN = 1.03
"""So many times as fast coded records must come."""
_LATE_TIMES = 4
"""So many times as long as plain records take, at most, those are said to have taken that did not come in time."""
_DECODE_MARGIN = 0.9
"""Of one thread's speed of decoding: what arrives must not wait for it."""
_SEND_MARGIN = 0.5
"""Of the code's speed: one record is sent while the next one is coded."""


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
class _Trials:
    """Knows which of the bytes that are sent go the other way: what is faster may have changed."""

    sent_bytes: int = 0
    at_bytes: int = FIRST_TRIAL_BYTES

    def take(self, size_bytes: int) -> bool:
        """Says whether the next bytes do."""
        self.sent_bytes += size_bytes
        if self.sent_bytes > self.at_bytes + TRIAL_BYTES:
            self.at_bytes += min(self.at_bytes, TRIAL_EVERY_BYTES)
        return self.sent_bytes > self.at_bytes


class CodingChoice:
    """Is a planner: it is told what was measured, and has neither a clock nor a lock."""

    def __init__(self) -> None:
        self.plain = Speed()
        """Of reading plain records until they are verified, by all connections together; so is `coded`."""
        self.coded = Speed()
        """In bytes of records, not of what travelled."""
        self.decoding = Speed()
        """Of one thread; so is `encoding`."""
        self.encoding = Speed()
        self.sending = Speed()
        """Of all connections together, in bytes as they travel."""
        self.is_behind = False
        """More is to be sent than is sent meanwhile."""
        self._keeping, self._asking, self._giving = _Trials(), _Trials(), _Trials()

    def told_read(self, plain_bytes: int, coded_bytes: int, taken_s: float) -> None:
        """Is told that records of so many bytes were read in a period. One in which many of both kinds came says
        nothing."""
        size_bytes = plain_bytes + coded_bytes
        if plain_bytes >= _ONE_KIND * size_bytes > 0:
            self.plain.add(size_bytes, taken_s)
        elif coded_bytes >= _ONE_KIND * size_bytes > 0:
            self.coded.add(size_bytes, taken_s)

    def told_late(self, size_bytes: int, taken_s: float) -> None:
        """Is told that coded records of so many bytes had not come after so long, when nobody waited any longer. Where
        plain ones would have, it is known by that alone how slow coded ones are: each more of them may come too late,
        and then it teaches nothing else."""
        if self.plain.rate * taken_s > size_bytes:
            late_s = min(taken_s / size_bytes, _LATE_TIMES / self.plain.rate)
            self.coded.add(KNOWN_BYTES, KNOWN_BYTES * late_s)

    def wants(self, size_bytes: int, ratio: float) -> bool:
        """Says whether a record that is to be sent should be coded; `ratio`: by how much it would become shorter."""
        if not (self.plain.is_known or self.sending.is_known):
            return False
        is_trial = self._keeping.take(size_bytes)
        return not (self.is_behind and self._sends_later()) and self.comes_sooner(ratio) is not is_trial

    def asks(self, size_bytes: int, ratio: float) -> bool:
        """Says whether records that somebody else would code now should be asked for coded."""
        return self.plain.is_known and self.comes_sooner(ratio) is not self._asking.take(size_bytes)

    def gives(self, size_bytes: int) -> bool:
        """Says whether a record should be coded for somebody who decodes it at once."""
        return self.sending.is_known and self._sends_later() is self._giving.take(size_bytes)

    def comes_sooner(self, ratio: float) -> bool:
        """Says whether a coded record would be read sooner. Before enough of them were read it is tried, where decoding
        would keep up."""
        if self.plain.is_known and self.coded.is_known:
            return self.coded.rate > _READ_MARGIN * self.plain.rate
        # Whoever reads what is only sent from here has such a link, too.
        link = self.plain if self.plain.is_known else self.sending
        return not self.decoding.is_known or ratio * link.rate < _DECODE_MARGIN * self.decoding.rate

    def _sends_later(self) -> bool:
        speeds = (self.sending, self.encoding)
        return all(speed.is_known for speed in speeds) and self.sending.rate >= _SEND_MARGIN * self.encoding.rate

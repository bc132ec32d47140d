"""Judges whether a load is faster than computing the same tokens, by the times of former loads and prefills."""

from __future__ import annotations

from math import isfinite

MIN_SAMPLES = 4
"""Least number of samples of loads, and of prefills, with which a load may be refused for being slow."""
SAMPLE_WEIGHT = 1 / 8
"""Weight of a new sample in a moving estimate. The first eight are averaged evenly, so that the first does not count
too much."""
CLEARLY_SLOWER = 1.2
"""A load is refused only when it is estimated to take this many times as long: estimates are rough."""
MAX_REFUSALS = 16
"""Most loads that are refused in a row for being slow. The next one is allowed as a probe, for a new sample."""
PROBE_WEIGHT = 3 / 4
"""Weight of the first sample after a probe was allowed: the estimate is old, and may stem from one bad sample."""
SLOWEST_OF = 8
"""The slowest of this many loads in a row is left out: other work may have delayed its copy, which happens rarely."""
MIN_SPREAD = 0.01
"""Relative spread of sizes below which they cannot tell a fixed time from a time for each byte."""
MIN_RATED_TOKENS = 64
"""Prompt tokens of a step, below which its time does not show how long one token takes."""
FREE_SHARE = 1 / 20
"""Prompt tokens are free if they make a step that decodes anyway longer by no more than this share of its time."""
MAX_FREE_TOKENS = 4096 - 1
"""Largest number of prompt tokens of a step that may be taken to be free."""
FREE_SAMPLES = 8
"""Number of samples that an estimate averages, and that it needs before tokens may count as free."""
FREE_PROBES = 2
"""Number of samples with which an estimate can rule out that tokens are free: fewer may be bad luck."""
PROBED_DOUBLINGS = 3
"""How often a number of tokens that is known to be free is doubled to find out whether more are free as well."""


class LoadJudge:
    """Decides whether a request loads tokens or computes them. Owned by the scheduler's thread. It has no clock: the
    caller measures.

    The judge compares what a load and computing add to the engine's work. A load adds its copy, in the background of
    steps that run anyway: a fixed time and a time for each byte, by a line through the times of former copies. Its
    request also waits for the end of a step, or behind other loads, but that is no cost of the load: the step runs for
    other requests, which computing would delay, and requests that compute queue as well. Computing adds to its steps
    the time that they take beyond steps that only decode as many requests, by a line through the times of those. That
    part would be spent anyway, for the other requests and for the last token of the prompt.

    A step that decodes reads all weights, and may compute some hundred tokens meanwhile in the same time: these tokens
    are free. The judge never lets so few be loaded: that would save no time, and their request would wait for steps
    that it does not need. It finds out how many tokens are free by trying more than are known to be.
    """

    def __init__(self) -> None:
        self._loads = _Timings()
        self._slowest: tuple[int, float] | None = None
        """Size in bytes and seconds of the load that is left out; None: no load is."""
        self._since_slowest = 0
        """Number of loads that ended since that one."""
        self._is_probing = False
        """Whether a probe was allowed, and no load has ended since."""
        self._prefills = _Timings()
        self.token_ns = 0
        """Nanoseconds that the engine takes to compute a token of a prompt; 0 until that is known."""
        self._decoding = _Timings()
        """Times of steps that only decode, over the number of their requests."""
        self._additions = [_Addition() for _ in range(MAX_FREE_TOKENS.bit_length() + 1)]
        """How much prompt tokens lengthen a step that decodes anyway, by the bit length of the number of tokens."""
        self._refusals = 0
        self.computing = 0
        """Prompt tokens in the measured step that was planned last, and those that the next step should compute for
        free. The planner of steps sets the former, and the judge adds the latter."""

    def note_load(self, size_bytes: int, seconds: float) -> None:
        """Notes that a load of so many bytes has ended, whose copy ran for that time on the slowest rank."""
        if not _is_measured(size_bytes, seconds):
            return
        if self._is_probing:
            self._is_probing, self._slowest = False, None
            self._loads.note(size_bytes, seconds)
            return
        former, self._slowest = self._slowest, (size_bytes, seconds)
        self._since_slowest += 1
        if former is None or self._since_slowest == SLOWEST_OF:
            self._since_slowest = 0
        elif self._find_slowness(*former) >= self._find_slowness(size_bytes, seconds):
            self._slowest = former
            self._loads.note(size_bytes, seconds)
        else:
            self._since_slowest = 0
            self._loads.note(*former)

    def note_prefill(self, tokens: int, seconds: float, *, decoding: int = 0) -> None:
        """Notes the time of a step that computed so many prompt tokens, and in which so many requests decoded."""
        anyway_s = self._decoding.predict_seconds(decoding) if self._decoding.samples else 0.0
        if decoding and anyway_s > 0 and seconds > 0 and 0 < tokens <= MAX_FREE_TOKENS:
            self._additions[tokens.bit_length()].note(seconds / anyway_s - 1)
            if self._is_free(tokens):
                return
        if tokens >= MIN_RATED_TOKENS:
            self._prefills.note(tokens, seconds - max(anyway_s, 0.0))
            if self._prefills.samples >= MIN_SAMPLES:
                self.token_ns = round(self._prefills.seconds_per_unit * 1e9)

    def note_decoding(self, requests: int, seconds: float) -> None:
        """Notes the time of a step in which so many requests decoded and no prompt was computed."""
        self._decoding.note(requests, seconds)

    def predict_load_s(self, size_bytes: int) -> float:
        """Returns for how many seconds the copy of a load is expected to run."""
        return self._loads.predict_seconds(size_bytes)

    def favours_load(self, tokens: int, size_bytes: int, *, rest: int = 0) -> bool:
        """Returns whether a request should load so many tokens, of `size_bytes`. `rest`: its further tokens, which are
        computed in either case. Call it once for each request, because the judge counts its answers."""
        if self._is_free(self.computing + tokens + rest):
            self.computing += tokens + rest
            return False
        loads = self._loads.samples + (self._slowest is not None)
        if min(loads, self._prefills.samples) < MIN_SAMPLES:
            return True
        if self.predict_load_s(size_bytes) <= tokens * self._prefills.seconds_per_unit * CLEARLY_SLOWER:
            self._refusals = 0
            return True
        if self._refusals < MAX_REFUSALS:
            self._refusals += 1
            return False
        self._refusals = 0
        self._is_probing = True
        self._loads.doubt()
        return True

    def _find_slowness(self, size_bytes: int, seconds: float) -> float:
        """Returns by which factor a load took longer than expected."""
        return seconds / (self.predict_load_s(size_bytes) if self._loads.samples else 1.0)

    def _is_free(self, tokens: int) -> bool:
        """Whether so many prompt tokens are free in a step that decodes, or the judge wants to find out if they are."""
        if tokens > MAX_FREE_TOKENS:
            return False
        bits = tokens.bit_length()
        same = self._additions[bits]
        if same.is_free or not same.may_be_free:
            return same.is_free
        near = self._additions[max(bits - PROBED_DOUBLINGS, 0) :]
        return any(other.is_free for other in near)


def _is_measured(amount: float, seconds: float) -> bool:
    """Whether a sample is usable. Clocks are corrected, and a load without bytes takes no time."""
    return amount > 0 and seconds > 0 and isfinite(amount) and isfinite(seconds)


class _Addition:
    """A moving estimate of how much prompt tokens lengthen a step that decodes, as a share of its time."""

    def __init__(self) -> None:
        self._samples = 0
        self._part = 0.0

    def note(self, part: float) -> None:
        """Notes the share by which a step took longer, negative if it was shorter. Only its size counts: a shorter step
        shows just as well how inexact the expected time is."""
        self._samples = min(self._samples + 1, FREE_SAMPLES)
        self._part += (abs(part) - self._part) / self._samples

    @property
    def is_free(self) -> bool:
        return self._samples == FREE_SAMPLES and self._part <= FREE_SHARE

    @property
    def may_be_free(self) -> bool:
        """Whether the samples so far allow that these tokens are free."""
        return self._samples < FREE_PROBES or self._part <= FREE_SHARE


class _Timings:
    """Moving estimates over (amount, seconds): means, and the line of least squares through them."""

    def __init__(self) -> None:
        self.samples = 0
        self._weight = 1.0
        self._amount = 0.0
        self._seconds = 0.0
        self._variance = 0.0
        self._covariance = 0.0

    @property
    def seconds_per_unit(self) -> float:
        return self._seconds / self._amount

    def note(self, amount: float, seconds: float) -> None:
        """Takes a sample into account, if it is usable."""
        if not _is_measured(amount, seconds):
            return
        weight = self._weight
        self._weight = max(SAMPLE_WEIGHT, weight / (1 + weight))
        more_amount, more_seconds = amount - self._amount, seconds - self._seconds
        self._amount += weight * more_amount
        self._seconds += weight * more_seconds
        self._variance = (1 - weight) * (self._variance + weight * more_amount**2)
        self._covariance = (1 - weight) * (self._covariance + weight * more_amount * more_seconds)
        self.samples += 1

    def doubt(self) -> None:
        """Makes the next sample count more than all before it."""
        self._weight = PROBE_WEIGHT

    def predict_seconds(self, amount: float) -> float:
        slope = self.seconds_per_unit
        if self._variance > (MIN_SPREAD * self._amount) ** 2:
            # Noise can turn the line; but nothing is faster for being larger, and the fixed time is not negative.
            slope = min(max(self._covariance / self._variance, 0.0), slope)
        return self._seconds + slope * (amount - self._amount)

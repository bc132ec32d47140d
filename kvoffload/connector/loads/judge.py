"""Is a load faster than computing the same tokens? Judged by what loads and prefills have taken so far."""

from __future__ import annotations

from math import isfinite

MIN_SAMPLES = 4
"""Of loads and of prefills each: with fewer nothing is refused."""
SAMPLE_WEIGHT = 1 / 8
"""Of a new sample in a moving estimate. The first eight are averaged evenly, or the first would count too much."""
CLEARLY_SLOWER = 1.2
"""A load is refused only when it is estimated to take this many times as long: estimates are rough."""
MAX_REFUSALS = 16
"""In a row. The next load is allowed as a probe, because what is never done is never measured again."""
PROBE_WEIGHT = 3 / 4
"""Of the first sample after a probe was allowed: what made us refuse may have been one bad measurement, and is old."""
MIN_SPREAD = 0.01
"""Relative spread of sizes below which they cannot tell a fixed time from a time for each byte."""
MIN_RATED_TOKENS = 64
"""A step with fewer does not tell what each of them takes."""
FREE_SHARE = 1 / 20
"""Tokens are computed for nothing beside requests that decode if their step takes no more than this part longer."""
MAX_FREE_TOKENS = 4096 - 1
"""More than these are never taken to be computed for nothing."""
FREE_SAMPLES = 8
"""As in a moving estimate; with fewer it is not known that tokens are computed for nothing."""
FREE_PROBES = 2
"""So few may be bad luck."""
PROBED_DOUBLINGS = 3
"""So far beyond what is computed for nothing it is tried whether more is."""


class LoadJudge:
    """Owned by the scheduler's thread. Has no clock: the caller measures.

    What is weighed is what each of the two adds to the engine's work. A load adds its copy, in the background of steps
    that run anyway: a fixed time and a time for each byte, by a line through what copies took. That its request waits
    for the end of a step, or behind other loads, is no cost of the load: the step runs for others, who would be
    delayed by computing, and requests that compute queue as well. Computing adds to its steps what they take beyond
    steps that only decode as many requests, by a line through those: that part is taken for the others, and for the
    last token of the prompt, which is computed in either case.

    A step that decodes reads all weights, and may compute some hundred tokens meanwhile in the same time. So many are
    never loaded: it would help nobody, and their request would wait for steps that it does not need. How many they are
    is found by trying, from what is known to be computed for nothing.
    """

    def __init__(self) -> None:
        self._loads = _Timings()
        self._prefills = _Timings()
        self._decoding = _Timings()
        """Of steps without prefill, over the requests in them."""
        self._additions = [_Addition() for _ in range(MAX_FREE_TOKENS.bit_length() + 1)]
        """Each is of tokens beside requests that decode, and stands at the number of bits of how many they are."""
        self._refusals = 0
        self.computing = 0
        """Tokens of prompts in the step that was planned last, and those that the next is to compute for nothing."""

    def note_load(self, size_bytes: int, seconds: float) -> None:
        """A load has ended whose copy ran for that time, on the slowest rank."""
        self._loads.note(size_bytes, seconds)

    def note_prefill(self, tokens: int, seconds: float, *, decoding: int = 0) -> None:
        """A step that computed so many prompt tokens, and in which so many requests decoded, took that time."""
        anyway_s = self._decoding.predict_seconds(decoding) if self._decoding.samples else 0.0
        if decoding and anyway_s > 0 and seconds > 0 and 0 < tokens <= MAX_FREE_TOKENS:
            self._additions[tokens.bit_length()].note(seconds / anyway_s - 1)
            if self._is_free(tokens):
                return
        if tokens >= MIN_RATED_TOKENS:
            self._prefills.note(tokens, seconds - max(anyway_s, 0.0))

    def note_decoding(self, requests: int, seconds: float) -> None:
        """A step in which so many requests decoded and nobody's prompt was computed took that time."""
        self._decoding.note(requests, seconds)

    @property
    def token_ns(self) -> int:
        """What the engine takes to compute a token of a prompt; 0: not known yet."""
        return round(self._prefills.seconds_per_unit * 1e9) if self._prefills.samples >= MIN_SAMPLES else 0

    def predict_load_s(self, size_bytes: int) -> float:
        """How long the copy of a load is going to run."""
        return self._loads.predict_seconds(size_bytes)

    def favours_load(self, tokens: int, size_bytes: int, *, rest: int = 0) -> bool:
        """Says whether to load, and is asked once for each request. The `rest` is computed in either case."""
        if self._is_free(self.computing + tokens + rest):
            self.computing += tokens + rest
            return False
        if min(self._loads.samples, self._prefills.samples) < MIN_SAMPLES:
            return True
        if self.predict_load_s(size_bytes) <= tokens * self._prefills.seconds_per_unit * CLEARLY_SLOWER:
            self._refusals = 0
            return True
        if self._refusals < MAX_REFUSALS:
            self._refusals += 1
            return False
        self._refusals = 0
        self._loads.doubt()
        return True

    def _is_free(self, tokens: int) -> bool:
        """Says whether a step that decodes computes so many for nothing, or that is to be found out."""
        if tokens > MAX_FREE_TOKENS:
            return False
        bits = tokens.bit_length()
        same = self._additions[bits]
        if same.is_free or not same.may_be_free:
            return same.is_free
        near = self._additions[max(bits - PROBED_DOUBLINGS, 0) :]
        return any(other.is_free for other in near)


class _Addition:
    """A moving estimate of what some tokens add to a step that decodes, as a part of that."""

    def __init__(self) -> None:
        self._samples = 0
        self._part = 0.0

    def note(self, part: float) -> None:
        """A step took so much longer. One that was shorter tells as much of how well its time was known before."""
        self._samples = min(self._samples + 1, FREE_SAMPLES)
        self._part += (abs(part) - self._part) / self._samples

    @property
    def is_free(self) -> bool:
        return self._samples == FREE_SAMPLES and self._part <= FREE_SHARE

    @property
    def may_be_free(self) -> bool:
        """Says whether nothing speaks against these tokens being free so far."""
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
        """Samples that cannot be are ignored: clocks are corrected, and nobody measured an empty load."""
        if not (amount > 0 and seconds > 0 and isfinite(amount) and isfinite(seconds)):
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
        """The next sample counts more than all before it."""
        self._weight = PROBE_WEIGHT

    def predict_seconds(self, amount: float) -> float:
        slope = self.seconds_per_unit
        if self._variance > (MIN_SPREAD * self._amount) ** 2:
            # Noise can turn the line; but nothing is faster for being larger, and the fixed time is not negative.
            slope = min(max(self._covariance / self._variance, 0.0), slope)
        return self._seconds + slope * (amount - self._amount)

"""An audit: asks each prompt cold, by the engine's own hits and restored, and judges whether the answers agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from kvoffload.audit.answers import Answer, Distance, find_difference, find_nearest, measure
from kvoffload.audit.audited_engine import AuditedEngine
from kvoffload.warm.json_client import AnswerError

ROUNDS = 3
"""Attempts to have a prompt restored. Between asking and the first attempt its blocks may not all be saved yet."""
MARGIN = 2.0
"""Factor on the largest difference among the engine's own answers. Without it a few answers would not show how far a
right one can be from them, and some of a hundred audits of a noisy engine would find a fault that is none."""


@dataclass(frozen=True)
class AuditPrompt:
    """A prompt of an audit."""

    number: int
    """The first prompt is 1."""
    text: list[int] | str
    """Tokens, or text."""
    seed: int | None = None
    """The seed that made the tokens, or None if they come from a file."""
    salt: str = ""
    """The `cache_salt` that makes the engine compute the prompt although it may know it."""


@dataclass
class Audited:
    """A prompt, and its answers. `why_not` says why these cannot be compared, and is empty if they can."""

    prompt: AuditPrompt
    cold: Answer | None = None
    own: list[Answer] = field(default_factory=list)
    """Answers by the engine's own cache."""
    restored: list[Answer] = field(default_factory=list)
    """Answers after the engine's own cache was emptied, if they were restored; the first ones perhaps only in part."""
    why_not: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The first position at which a restored answer and the engine's own hit differ."""

    prompt: AuditPrompt
    position: int
    own: tuple[str, float] | None
    """Token and logprob, or None if the answer has ended before."""
    restored: tuple[str, float] | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of an audit."""

    prompts: int
    restored: int
    """Prompts that were restored, and are judged."""
    agreed: int
    is_exact: bool
    """Whether all own hits of the engine are equal to each other, so that restored answers must be, too."""
    otherwise: int
    """Judged prompts of which another number of tokens was restored than the engine's own hits have. Those answers are
    computed in other steps, which round otherwise, and may differ by MARGIN * `bound` even if `is_exact`."""
    bound: float
    """Largest difference of logprobs among the engine's own answers: between hits, and between hits and cold."""
    largest: float
    """Largest difference of logprobs between a restored answer and the own hit nearest to it."""
    unlike: Finding | None
    """The first prompt that does not agree."""
    why_not: Counter[str]
    """Why other prompts are not judged, and how many."""
    fault: str
    """Why the audit ended before its end, or empty."""

    @property
    def disagreed(self) -> int:
        return self.restored - self.agreed


class Auditor:
    """Asks the prompts of one audit."""

    def __init__(self, engine: AuditedEngine, *, own_hits: int) -> None:
        self._engine = engine
        self._own_hits = own_hits

    def run(self, prompts: Sequence[AuditPrompt], *, tell: Callable[[str], None] = lambda doing: None) -> Verdict:
        """Runs the audit. `tell` hears of each request. A fault of the engine ends the audit; what was answered before
        is judged."""
        rows, fault = [Audited(prompt) for prompt in prompts], ""
        try:
            self._ask_all(rows, tell)
        except AnswerError as stopped:
            fault = str(stopped)
        return judge(rows, fault=fault)

    def _ask_all(self, rows: Sequence[Audited], tell: Callable[[str], None]) -> None:
        # Before anything is computed for nothing.
        self._engine.empty()
        for row in rows:
            self._ask_first(row, tell)
        if not any(is_told(row) for row in rows) and self._engine.count_restored() is None:
            raise AnswerError(
                "the engine does not say what was restored: there is neither usage.prompt_tokens_details.cached_tokens"
                " (vLLM: --enable-prompt-tokens-details, SGLang: --enable-cache-report) nor"
                " vllm:external_prefix_cache_hits in /metrics"
            )
        for _ in range(ROUNDS):
            for row in rows:
                if row.own and not row.why_not and not is_whole(row):
                    self._ask_restored(row, tell)

    def _ask_first(self, row: Audited, tell: Callable[[str], None]) -> None:
        prompt = row.prompt
        tell(f"prompt {prompt.number}: cold")
        row.cold, hits = self._ask_counted(prompt)
        if row.cold.cached or hits:
            row.why_not = "known to the engine before"
            return
        for _ in range(self._own_hits):
            tell(f"prompt {prompt.number}: own hit")
            answer, hits = self._ask_counted(prompt)
            row.own.append(answer)
            if hits:
                row.why_not = "restored instead of an own hit"
                return
        if row.own[0].cached is not None and not all(answer.cached == row.own[0].cached for answer in row.own):
            row.why_not = "own hits of different lengths"
        if is_told(row) and not row.own[0].cached:
            row.why_not = "no own hit"

    def _ask_restored(self, row: Audited, tell: Callable[[str], None]) -> None:
        # Before each prompt, because prompts of a file may begin alike.
        self._engine.empty()
        tell(f"prompt {row.prompt.number}: restored")
        answer, hits = self._ask_counted(row.prompt)
        if answer.cached and hits == 0:
            row.why_not = "" if row.restored else "in the engine's own cache, although that was emptied"
        elif answer.cached or (answer.cached is None and hits):
            row.restored.append(answer)

    def _ask_counted(self, prompt: AuditPrompt) -> tuple[Answer, float | None]:
        """Returns an answer, and how many tokens were restored meanwhile. None: the engine does not count that."""
        before = self._engine.count_restored()
        answer = self._engine.ask(prompt.text, salt=prompt.salt)
        after = None if before is None else self._engine.count_restored()
        return answer, None if before is None or after is None else max(after - before, 0.0)


def is_whole(row: Audited) -> bool:
    """Whether as much of a prompt was restored as the engine's own cache had."""
    return bool(row.restored) and (row.restored[-1].cached or 0) >= (row.own[0].cached or 0)


def is_told(row: Audited) -> bool:
    """Whether the server has said of any of these answers how much was cached. SGLang says nothing of none."""
    return any(answer.cached is not None for answer in (row.cold, *row.own) if answer is not None)


def judge(rows: Sequence[Audited], *, fault: str = "") -> Verdict:
    """Judges the answers of an audit."""
    compared = [row for row in rows if row.own and not row.why_not]
    is_exact = all(answer == row.own[0] for row in compared for answer in row.own)
    bound = max((distance.largest for row in compared for distance in _measure_own(row)), default=0.0)
    judged = [row for row in compared if row.restored]
    findings, largest = [], 0.0
    for row in judged:
        found = None
        for restored in row.restored:
            own, distance = find_nearest(restored, row.own)
            largest = max(largest, distance.largest)
            has_other_length = restored.cached != own.cached
            if is_exact and not has_other_length:
                if restored != own:
                    found = found or _describe(row.prompt, own, restored, find_difference(own, restored))
                continue
            allowed = bound * MARGIN
            if not _is_within(distance, allowed, row):
                position = distance.largest_at
                if distance.position is not None and distance.largest <= allowed:
                    position = distance.position
                found = found or _describe(row.prompt, own, restored, position)
        findings.append(found)
    return Verdict(
        prompts=len(rows),
        restored=len(judged),
        agreed=findings.count(None),
        is_exact=is_exact,
        otherwise=sum(row.restored[-1].cached != row.own[0].cached for row in judged),
        bound=bound,
        largest=largest,
        unlike=next((found for found in findings if found is not None), None),
        why_not=Counter(row.why_not or "not restored" for row in rows if row.why_not or not row.restored),
        fault=fault,
    )


def _measure_own(row: Audited) -> Iterator[Distance]:
    """Measures all pairs of the engine's own answers."""
    assert row.cold is not None
    for one, other in combinations((row.cold, *row.own), 2):
        yield measure(one, other)


def _is_within(distance: Distance, bound: float, row: Audited) -> bool:
    """Whether a restored answer is near to an own hit, as the engine's own answers are to each other. Tokens may
    differ if both have logprobs within the bound, and where the engine's own answers to this prompt differ."""
    if distance.largest > bound or not distance.is_unknown:
        return distance.largest <= bound
    parted = [own.position for own in _measure_own(row) if own.position is not None]
    return bool(parted) and distance.position is not None and distance.position >= min(parted)


def _describe(prompt: AuditPrompt, own: Answer, restored: Answer, position: int) -> Finding:
    def look(answer: Answer) -> tuple[str, float] | None:
        step = answer.steps[position] if position < len(answer.steps) else None
        return None if step is None else (step.token, step.logprob)

    return Finding(prompt=prompt, position=position, own=look(own), restored=look(restored))

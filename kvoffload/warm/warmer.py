"""Sends prompts to an engine, some at a time, and asks the cache how much of each is there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from kvoffload.warm.json_client import AnswerError, JsonClient
from kvoffload.warm.prompt_file import BadLine, WarmPrompt

THREADS_PER_REQUEST = 3
"""Prompts that the engine has answered wait for their saves meanwhile."""
WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6)
"""Between looks at which no more of a prompt is there. After the last one, all is there that comes."""
MAX_LOOKS = 120
_SHAPING = ("model", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens", "add_generation_prompt")
"""Fields of a request that change a prompt's tokens, other than its text."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of one line."""

    line: int
    tokens: int = 0
    before: int = 0
    """Tokens that a load could have brought."""
    after: int = 0
    fault: str = ""
    """Empty: the engine has computed it."""
    uncounted: str = ""
    """Why the cache did not tell how much of it is there. Empty: the cache did, or it was not asked."""


@dataclass(frozen=True, kw_only=True)
class CacheQuestion:
    """Fields of the question to the cache in addition to the tokens; empty ones are left out."""

    model: str = ""
    identity: str = ""
    seed: str = ""

    def ask(self, tokens: list[int], salt: str) -> dict[str, Any]:
        given = {"model": self.model, "identity": self.identity, "seed": self.seed, "salt": salt}
        return {"tokens": tokens, **{name: text for name, text in given.items() if text}}


NO_WORD = CacheQuestion()


@dataclass(frozen=True)
class _Hits:
    tokens: int
    are_all: bool
    """No more of the prompt can be hit."""


_NOTHING = _Hits(0, are_all=False)


class Warmer:
    """Sends each prompt once. Its threads end with the process."""

    def __init__(
        self,
        engine: JsonClient,
        cache: JsonClient | None,
        *,
        at_once: int,
        model: str,
        question: CacheQuestion = NO_WORD,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`cache`: None if no cache is asked. `model` is for lines that name none."""
        self._engine = engine
        self._cache = cache
        self._slots = threading.Semaphore(at_once)
        self._threads = at_once if cache is None else at_once * THREADS_PER_REQUEST
        self._model = model
        self._question = question
        self._wait = wait

    def run(self, prompts: Iterable[WarmPrompt | BadLine]) -> Iterator[Outcome]:
        """Yields each prompt's outcome when it is done, in any order. Reads only as many prompts as are worked on."""
        work: queue.Queue[WarmPrompt | None] = queue.Queue()
        done: queue.Queue[Outcome | Exception] = queue.Queue()

        def keep_working() -> None:
            while (prompt := work.get()) is not None:
                try:
                    done.put(self._warm(prompt))
                except Exception as fault:  # noqa: BLE001 (raised by the thread that waits)
                    done.put(fault)

        def take() -> Outcome:
            outcome = done.get()
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        for _ in range(self._threads):
            threading.Thread(target=keep_working, name="kvoffload-warm", daemon=True).start()
        open_ = 0
        try:
            for prompt in prompts:
                if isinstance(prompt, BadLine):
                    yield Outcome(line=prompt.line, fault=prompt.why)
                    continue
                if open_ == self._threads:
                    yield take()
                    open_ -= 1
                work.put(prompt)
                open_ += 1
            for _ in range(open_):
                yield take()
        finally:
            for _ in range(self._threads):
                work.put(None)

    def _warm(self, prompt: WarmPrompt) -> Outcome:
        body = {"model": self._model, **prompt.body}
        salt = str(body.get("cache_salt") or "")
        tokens, before, after, uncounted = None, _NOTHING, _NOTHING, ""
        try:
            # The names of an adapter's blocks are known to its engine alone.
            if self._cache is not None and body["model"] == self._model:
                tokens = self._read_tokens(prompt, body)
                before = self._count_hits(self._cache, tokens, salt)
        except AnswerError as fault:
            uncounted = str(fault)
        try:
            with self._slots, _reading():
                count = int(self._engine.post(prompt.path, body)["usage"]["prompt_tokens"])
        except AnswerError as fault:
            return Outcome(line=prompt.line, fault=str(fault))
        try:
            if self._cache is not None and tokens is not None and not uncounted:
                after = self._await_saves(self._cache, tokens, salt, before)
        except AnswerError as fault:
            before, uncounted = _NOTHING, str(fault)
        return Outcome(line=prompt.line, tokens=count, before=before.tokens, after=after.tokens, uncounted=uncounted)

    def _read_tokens(self, prompt: WarmPrompt, body: dict[str, Any]) -> list[int]:
        if prompt.tokens is not None:
            return prompt.tokens
        given = {prompt.kind: body[prompt.kind]} | {name: body[name] for name in _SHAPING if name in body}
        with _reading():
            return list(self._engine.post("/tokenize", given)["tokens"])

    def _count_hits(self, cache: JsonClient, tokens: list[int], salt: str) -> _Hits:
        """Counts the hit. If several identities are meant, the one with the most tokens counts."""
        with _reading():
            rows = cache.post("/v1/prefix", self._question.ask(tokens, salt))["identities"]
            hits = [_read_hits(row, len(tokens)) for row in rows if row["hit_tokens"] is not None]
            if rows and not hits:
                raise AnswerError(f"the cache cannot say how much is there: {rows[0]['why']}")
        return max(hits, key=lambda one: one.tokens, default=_NOTHING)

    def _await_saves(self, cache: JsonClient, tokens: list[int], salt: str, before: _Hits) -> _Hits:
        """Waits, a bounded time, until the cache has saved what the engine has computed."""
        there = now = before
        quiet = 0
        for _ in range(MAX_LOOKS):
            if now.are_all:
                return now
            now = self._count_hits(cache, tokens, salt)
            if now.tokens > there.tokens:
                there, quiet = now, 0
            elif quiet == len(WAITS_S):
                return now
            if not now.are_all:
                self._wait(WAITS_S[quiet])
                quiet += 1
        return there


def _read_hits(row: dict[str, Any], tokens: int) -> _Hits:
    """A prompt's last token is always computed, and a hit has whole blocks."""
    hit, block = int(row["hit_tokens"]), int(row.get("block_tokens", 0))
    return _Hits(hit, are_all=block > 0 and hit >= (tokens - 1) // block * block)


@contextmanager
def _reading() -> Iterator[None]:
    """AnswerError: what was answered has another form."""
    try:
        yield
    except (LookupError, TypeError, ValueError, OverflowError) as fault:
        raise AnswerError(f"an answer of another form: {fault!r}"[:200]) from None

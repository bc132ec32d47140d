"""Sends prompts to an engine, some at a time, and asks the cache how much of each is there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvoffload.warm.json_client import AnswerError, JsonClient
from kvoffload.warm.prompt_file import BadLine, WarmPrompt

THREADS_PER_REQUEST = 3
"""Prompts that the engine has answered wait for their saves meanwhile."""
LOOK_S = 0.25
QUIET_LOOKS = 12
"""After so many looks at which no more of a prompt was there, all is there that comes."""
MAX_LOOKS = 120
_SHAPING = ("model", "tools", "chat_template", "chat_template_kwargs", "add_special_tokens", "add_generation_prompt")
"""What changes a prompt's tokens beside its words."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one line."""

    line: int
    tokens: int = 0
    before: int = 0
    """Tokens that a load could have brought."""
    after: int = 0
    fault: str = ""
    """Empty: the engine has computed it, and the cache has answered if it was asked."""


@dataclass(frozen=True, kw_only=True)
class CacheQuestion:
    """What is said to the cache beside tokens; empty: nothing."""

    model: str = ""
    identity: str = ""
    seed: str = ""

    def ask(self, tokens: list[int], salt: str) -> dict[str, Any]:
        given = {"model": self.model, "identity": self.identity, "seed": self.seed, "salt": salt}
        return {"tokens": tokens, **{name: text for name, text in given.items() if text}}


NO_WORD = CacheQuestion()


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
        """`cache`: None if nobody is asked. `model` is for lines that name none."""
        self._engine = engine
        self._cache = cache
        self._slots = threading.Semaphore(at_once)
        self._threads = at_once if cache is None else at_once * THREADS_PER_REQUEST
        self._model = model
        self._question = question
        self._wait = wait

    def run(self, prompts: Iterable[WarmPrompt | BadLine]) -> Iterator[Outcome]:
        """Tells of each prompt when it is done, in any order. No more are read than are worked on."""
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
        try:
            # The names of an adapter's blocks are known to its engine alone.
            is_asked = self._cache is not None and body["model"] == self._model
            tokens = self._read_tokens(prompt, body) if is_asked else None
            salt = str(body.get("cache_salt") or "")
            before = self._count_hits(tokens, salt)
            with self._slots:
                answer = self._engine.post(prompt.path, body)
            count = int(answer["usage"]["prompt_tokens"])
            return Outcome(line=prompt.line, tokens=count, before=before, after=self._await_saves(tokens, salt, before))
        except AnswerError as fault:
            return Outcome(line=prompt.line, fault=str(fault))
        except (LookupError, TypeError, ValueError, OverflowError) as fault:
            return Outcome(line=prompt.line, fault=f"an answer of another form: {fault!r}"[:200])

    def _read_tokens(self, prompt: WarmPrompt, body: dict[str, Any]) -> list[int]:
        if prompt.tokens is not None:
            return prompt.tokens
        given = {prompt.kind: body[prompt.kind]} | {name: body[name] for name in _SHAPING if name in body}
        return list(self._engine.post("/tokenize", given)["tokens"])

    def _count_hits(self, tokens: list[int] | None, salt: str) -> int:
        """Of several identities that are meant it is the one that has most."""
        if self._cache is None or tokens is None:
            return 0
        rows = self._cache.post("/v1/prefix", self._question.ask(tokens, salt))["identities"]
        hits = [int(row["hit_tokens"]) for row in rows if row["hit_tokens"] is not None]
        if rows and not hits:
            raise AnswerError(f"the cache cannot say how much is there: {rows[0]['why']}")
        return max(hits, default=0)

    def _await_saves(self, tokens: list[int] | None, salt: str, before: int) -> int:
        """What the engine has computed is saved a little later."""
        if tokens is None:
            return 0
        there, quiet = before, 0
        for _ in range(MAX_LOOKS):
            now = self._count_hits(tokens, salt)
            quiet = 0 if now > there else quiet + 1
            there = max(there, now)
            if quiet == QUIET_LOOKS:
                return now
            self._wait(LOOK_S)
        return there

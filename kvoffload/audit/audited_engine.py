"""The requests of an audit to an engine: for answers, for an empty cache of its own, and for a counter."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable
from typing import Any, Final

from kvoffload.audit.answers import Answer, read_completion
from kvoffload.warm.json_client import AnswerError, JsonClient

COMPLETIONS: Final = "/v1/completions"
EMPTYING: Final = ("/reset_prefix_cache", "/flush_cache")
"""Paths that empty the cache of vLLM and of SGLang."""
EMPTY_WAITS_S: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""Waits between attempts to empty the cache, while blocks are still in use."""
LIKELIEST: Final = 5
"""Tokens of each position whose logprobs are asked for. vLLM and SGLang allow as many unless told otherwise."""
_RESTORED: Final = re.compile(rb"^vllm:external_prefix_cache_hits(?:_total)?(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)


class AuditedEngine:
    """Asks one engine, one request at a time."""

    def __init__(
        self, client: JsonClient, *, model: str, answer_tokens: int, wait: Callable[[float], None] = time.sleep
    ) -> None:
        self._client = client
        self._model = model
        self._answer_tokens = answer_tokens
        self._wait = wait
        self._emptying: tuple[str, ...] = EMPTYING

    def ask(self, prompt: list[int] | str, *, salt: str = "") -> Answer:
        """Asks for the likeliest answer to a prompt. AnswerError."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._answer_tokens,
            "temperature": 0,
            "seed": 0,
            "logprobs": LIKELIEST,
            # Two tokens may have the same text.
            "return_tokens_as_token_ids": True,
            "ignore_eos": True,
            "stream": False,
        }
        given = self._client.post(COMPLETIONS, body | ({"cache_salt": salt} if salt else {}))
        return read_completion(given, max_tokens=self._answer_tokens)

    def empty(self) -> None:
        """Empties the engine's own cache, and leaves what its connector has. AnswerError: that did not succeed."""
        for wait_s in (*EMPTY_WAITS_S, 0.0):
            if self._try_to_empty():
                return
            self._wait(wait_s)
        raise AnswerError(f"{self._emptying[0]} did not empty the engine's cache, because blocks of it are in use")

    def _try_to_empty(self) -> bool:
        """Returns False if blocks are in use. AnswerError: the engine has no such path."""
        for path in self._emptying:
            status, data = self._client.exchange("POST", path, b"")
            if status in (404, 405):
                continue
            self._emptying = (path,)
            if status in (401, 403):
                raise AnswerError(f"{path} answers {status}: it wants another key")
            return status == 200 and b'"success":false' not in b"".join(data[:200].split())
        raise AnswerError(
            f"the engine's own cache cannot be emptied: there is neither {EMPTYING[0]}, which vLLM has with"
            f" VLLM_SERVER_DEV_MODE=1, nor SGLang's {EMPTYING[1]}"
        )

    def count_restored(self) -> float | None:
        """Returns how many tokens vLLM's connector has restored since the engine began. None: there is no such
        counter. AnswerError: nothing answers."""
        status, data = self._client.exchange("GET", "/metrics", None)
        rows = _RESTORED.findall(data) if status == 200 else []
        try:
            total = sum(map(float, rows))
        except ValueError:
            return None
        return total if rows and math.isfinite(total) else None

"""An OpenAI-compatible engine that computes nothing: what it answers is up to the test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.kit.http_answers import Asked, answering

LETTER_TOKENS = 32
MODEL, ROOT = "served-name", "made-up/model"


def make_tokens(text: str) -> list[int]:
    """Makes several tokens of each letter, so that texts of a few letters have several blocks."""
    return [ord(letter) for letter in text for _ in range(LETTER_TOKENS)]


@dataclass
class PlayedEngine:
    """`compute` hears of each prompt's tokens. `faults` are statuses that requests for answers get first. It plays the
    HTTP face of a cache server, too, which has `hit_tokens` of everything."""

    address: str = ""
    compute: Callable[[list[int]], None] = lambda tokens: None
    faults: list[int] = field(default_factory=list)
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: set[str | None] = field(default_factory=set)
    hit_tokens: int = 0

    def answer(self, path: str, given: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": MODEL, "root": ROOT}]}
        if path == "/v1/prefix":
            return 200, {"identities": [{"hit_tokens": self.hit_tokens}]}
        text = given["prompt"] if "prompt" in given else "".join(one["content"] for one in given["messages"])
        tokens = make_tokens(text) if isinstance(text, str) else text
        if path == "/tokenize":
            return 200, {"tokens": tokens}
        self.asked.append({"path": path, **given})
        if self.faults:
            fault = self.faults.pop(0)
            return fault, {"error": f"fault {fault}"}
        self.compute(tokens)
        return 200, {"usage": {"prompt_tokens": len(tokens)}}


@contextmanager
def played_engine(engine: PlayedEngine) -> Iterator[PlayedEngine]:
    def answer(asked: Asked) -> tuple[int, bytes]:
        engine.keys.add(asked.headers["Authorization"])
        status, what = engine.answer(asked.path, json.loads(asked.body) if asked.body else {})
        return status, json.dumps(what).encode()

    with answering(answer) as engine.address:
        yield engine

"""An engine behind HTTP with a cache of its own and a connector: made answers, with the faults that a test wants."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.kit.http_answers import Asked, answering

MODEL = "served-name"
BLOCK = 16
ONE_BIT = 2.0**-22
"""The last bit of a float32 between 2 and 4."""


@dataclass
class CachingEngine:
    """Remembers prompts in its own cache, until that is emptied, and in its connector's."""

    address: str = ""
    damage: dict[int, str] = field(default_factory=dict)
    """Faults of restored answers, by the number of the prompt from 1 on: `token`, `bit`, `other`, `end` or `far`."""
    lost: set[int] = field(default_factory=set)
    """Numbers of prompts that the connector loses."""
    late: int = 0
    """Requests after emptying at which the connector has nothing yet."""
    noise: float = 0.0
    """Largest random change of a logprob in answers that are not computed cold."""
    restored_block: int = BLOCK
    tells_cached: bool = True
    counts_hits: bool = True
    counter: str = ""
    """The text of the counter, instead of a number."""
    emptying: str = "/reset_prefix_cache"
    empties: bool = True
    busy: int = 0
    """Attempts to empty the cache that do not succeed."""
    answers_with: Any = None
    """Another object in the place of answers."""
    fails_after: int = 1 << 30
    asked: list[dict[str, Any]] = field(default_factory=list)
    emptied: int = 0
    _own: set[str] = field(default_factory=set)
    _saved: dict[str, int] = field(default_factory=dict)
    _hits: int = 0
    _chance: random.Random = field(default_factory=lambda: random.Random(1))

    def answer(self, path: str, given: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"data": [{"id": MODEL}]}
        if path == "/metrics":
            rows = f'vllm:external_prefix_cache_hits_total{{engine="0"}} {self.counter or float(self._hits)}\n'
            return (200, f"# HELP x\n{rows}") if self.counts_hits else (404, "no")
        if path == self.emptying:
            return self._empty()
        if path != "/v1/completions":
            return 404, "Not Found"
        self.asked.append(given)
        if len(self.asked) > self.fails_after:
            return 500, {"error": "lost"}
        return 200, self.answers_with if self.answers_with is not None else self._complete(given)

    def _empty(self) -> tuple[int, Any]:
        self.emptied += 1
        if self.busy > 0:
            self.busy -= 1
            return 200, {"success": False}
        if self.empties:
            self._own.clear()
        return 200, {"success": True} if self.emptying == "/reset_prefix_cache" else "Cache flushed.\n"

    def _complete(self, given: dict[str, Any]) -> dict[str, Any]:
        name = json.dumps([given["prompt"], given.get("cache_salt")])
        size = len(given["prompt"])
        is_own = name in self._own
        number = self._saved.setdefault(name, len(self._saved) + 1)
        is_known = any(name == json.dumps([one["prompt"], one.get("cache_salt")]) for one in self.asked[:-1])
        is_restored = is_known and not is_own and number not in self.lost
        if is_restored and self.late:
            self.late -= 1
            is_restored = False
        self._own.add(name)
        block = BLOCK if is_own else self.restored_block
        cached = (size - 1) // block * block if is_own or is_restored else 0
        self._hits += cached if is_restored else 0
        told = make_answer(name, given["max_tokens"], is_cold=not cached)
        if cached and self.noise:
            shake(told, self._chance, self.noise)
        if is_restored and number in self.damage:
            spoil(told, self.damage[number])
        usage: dict[str, Any] = {"prompt_tokens": size}
        if self.tells_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return {"choices": [{"index": 0, "text": "", "logprobs": told}], "usage": usage}


def make_answer(name: str, tokens: int, *, is_cold: bool) -> dict[str, Any]:
    """Makes an answer of a few likeliest tokens for each position. Cold ones are rounded a little differently."""
    chance = random.Random(name)
    tops = []
    for _ in range(tokens):
        ids = chance.sample(range(100), 5)
        values = sorted((-2.0 - chance.random() for _ in ids), reverse=True)
        tops.append({f"token_id:{one}": value + 0.01 * is_cold for one, value in zip(ids, values, strict=True)})
    return {
        "tokens": [next(iter(top)) for top in tops],
        "token_logprobs": [next(iter(top.values())) for top in tops],
        "top_logprobs": tops,
    }


def shake(told: dict[str, Any], chance: random.Random, noise: float) -> None:
    """Changes every logprob a little, and no token."""
    for at, top in enumerate(told["top_logprobs"]):
        for token in top:
            top[token] += chance.uniform(-noise, noise)
        told["token_logprobs"][at] = top[told["tokens"][at]]


def spoil(told: dict[str, Any], how: str) -> None:
    """Changes an answer at its fourth token."""
    top = told["top_logprobs"][3]
    first, second = list(top)[:2]
    if how == "end":
        for values in told.values():
            del values[3:]
    elif how == "token":
        told["tokens"][3], told["token_logprobs"][3] = second, top[second]
    elif how == "other":
        told["tokens"][3], told["token_logprobs"][3] = "token_id:777", -1.5
        told["top_logprobs"][3] = {"token_id:777": -1.5}
    else:
        top[first] += ONE_BIT if how == "bit" else 0.5
        told["token_logprobs"][3] = top[first]


def change(told: Any, path: list[Any], value: Any) -> Any:
    """Returns an answer with another value at this place."""
    told = copy.deepcopy(told)
    place = told
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return told


@contextmanager
def caching_engine(engine: CachingEngine) -> Iterator[CachingEngine]:
    def answer(asked: Asked) -> tuple[int, bytes]:
        status, what = engine.answer(asked.path, json.loads(asked.body) if asked.body else {})
        return status, what.encode() if isinstance(what, str) else json.dumps(what).encode()

    with answering(answer) as engine.address:
        yield engine

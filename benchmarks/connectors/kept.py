"""How much of what is kept can a later request use, and how much of what it could use is kept?"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.connectors.engine_child import kvoffload, make_prompt, run_engine
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.child import Child
from kvoffload.cache import GroupRule, longest_boundary, needed_blocks
from kvoffload.types import HASH_BYTES
from tests.vllm.tiny_models import GDN, SLIDING

CONVERSATIONS = 8
TURNS = 4
SYSTEM_TOKENS = 750
SHARING = 4
"""Conversations that begin with the same system prompt."""
ANSWER_TOKENS = 24
LONGEST = 2500
ENGINE = {"kv_cache_memory_bytes": 1 << 30, "max_model_len": 4096}
INFINITE = {**ENGINE, "prefix_cache_retention_interval": None}
"""Its own cache keeps every window, and has room for all."""

Records = set[tuple[int, bytes]]
"""(group, name)."""


@dataclass(frozen=True)
class Served:
    """A request as the cache names it: of each group, the names of its whole blocks."""

    names: tuple[tuple[bytes, ...], ...]
    tokens: int


def find_usable(rules: Sequence[GroupRule], alignment: int, served: Sequence[Served], kept: Records) -> Records:
    """Of `kept`, what a request could load that has a prefix with one of these: at any boundary that a hit can have."""
    usable: Records = set()
    for request in served:
        for boundary in range(alignment, request.tokens + 1, alignment):
            found = longest_boundary(
                rules,
                local=0,
                limit=boundary,
                alignment=alignment,
                is_present=lambda group, index, names=request.names: (group, names[group][index]) in kept,  # type: ignore[misc]
            )
            if found == boundary:
                for group, rule in enumerate(rules):
                    needed = needed_blocks(rule, local=0, boundary=boundary)
                    usable |= {(group, request.names[group][index]) for index in needed}
    return usable


class PublishedRecords:
    """Records that a connector's scheduler side publishes and serves from now on, in the engine's process."""

    def __init__(self, side: Any) -> None:
        self._groups = side.parts.groups
        self._alignment = self._groups.alignment
        self._kept: Records = set()
        self._served: list[Served] = []
        cache, publish, end = side.parts.cache, side.parts.cache.publish, side.end_request

        def note_publish(publication: Any) -> bool:
            self._kept |= {(publication.slots.group, name) for name in _split(bytes(publication.hashes))}
            return bool(publish(publication))

        def note_end(request: Any, block_ids: Any) -> None:
            chain = side.requests[request.request_id].chain
            chain.follow(request.block_hashes)
            counts = [chain.tokens // rule.block_size for rule in self._groups.rules]
            names = (tuple(_split(chain.names(group, range(count)))) for group, count in enumerate(counts))
            self._served.append(Served(tuple(names), chain.tokens))
            end(request, block_ids)

        cache.publish = note_publish
        side.end_request = note_end

    def count(self) -> dict[str, int]:
        usable = find_usable(self._groups.rules, self._alignment, self._served, self._kept)
        return {
            "kept": self._size(self._kept),
            "usable": self._size(usable),
            "records": len(self._kept),
            "usable_records": len(usable),
        }

    def _size(self, records: Records) -> int:
        return sum(self._groups.facts[group].record_bytes for group, _ in records)


def _split(names: bytes) -> Iterator[bytes]:
    return (bytes(one) for one in zip(*[iter(names)] * HASH_BYTES, strict=True))


def measure_kept(folder: Path, progress: Progress, *, conversations: int = CONVERSATIONS) -> Iterator[Result]:
    """Measures models with windows and states: bytes, and the hits that they brought, against an infinite cache."""
    for model in (GDN, SLIDING):
        progress(f"conversations with {model.name}")
        with run_engine(folder, model.name, kvoffload(memory="2GiB"), **ENGINE) as engine:
            engine.ask("record_published")
            hit, prompt = _converse(engine, conversations, forgets=True)
            count = engine.ask("count_published")
        with run_engine(folder, model.name, None, **INFINITE) as engine:
            infinite, _ = _converse(engine, conversations, forgets=False)
        params: dict[str, int | float | str] = {"model": model.name, "conversations": conversations, "turns": TURNS}
        yield Result(
            name="kept",
            value=count["kept"] / 2**20,
            limit=count["usable"] / 2**20,
            unit="MiB",
            spread=0.0,
            goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.05),
            params={**params, "records": count["records"]},
        )
        yield Result(
            name="hits of what is kept",
            value=hit,
            limit=infinite,
            unit="tokens",
            spread=0.0,
            goal=None,
            params={**params, "prompts": prompt},
        )


def _converse(engine: Child, conversations: int, *, forgets: bool) -> tuple[int, int]:
    """Turn by turn, all conversations in each: (prompt tokens that were not computed, prompt tokens). `forgets`: the
    engine's own cache is empty before every request."""
    histories = [_begin(number) for number in range(conversations)]
    hit = prompts = 0
    for turn, number in itertools.product(range(TURNS), range(conversations)):
        history = histories[number]
        chance = random.Random(1000 * turn + number)
        history += make_prompt(chance.randrange(1 << 30), chance.randint(300, 550) if turn else 300)
        if forgets:
            engine.ask("reset")
        output = engine.ask("generate_tokens", history, ANSWER_TOKENS)
        hit, prompts = hit + output["cached"], prompts + len(history)
        history += output["answer"]
        assert len(history) <= LONGEST + SYSTEM_TOKENS
    engine.ask("wait_until_saved")
    return hit, prompts


def _begin(number: int) -> list[int]:
    """Before the first turn: every other conversation has the system prompt, some others a document."""
    if number % 2 == 0 and number < 2 * SHARING:
        return make_prompt(1, SYSTEM_TOKENS)
    return make_prompt(100 + number, 100 * number)

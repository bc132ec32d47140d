"""The scenario of pools that are too small: hits of our connector, of the better ideal one, and of the best of all
policies, and where tokens were lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, Any

from benchmarks.ground.accelerator import StepCost
from benchmarks.ground.bound import HitBound, Passage
from benchmarks.ground.engine import Run
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.figures import compare_runs, count_hits, serve_parts
from benchmarks.ground.ledger import PoolLedger
from benchmarks.ground.models import Model
from benchmarks.ground.server import count_left
from benchmarks.ground.trial import open_ideal, open_ours
from benchmarks.ground.work import Ask, come_at, count_tokens, cut, read_conversations
from kvoffload.bench.base import Bound, Goal, Measure, Result
from kvoffload.cache import GroupRule
from kvoffload.kvspec import ReuseRule
from kvoffload.units import GIB, MIB

if TYPE_CHECKING:
    from benchmarks.ground.scenarios import Ground

REQUESTS = 480
"""About so many requests of the trace come, without those that have too many tokens."""
MOST_TOKENS = 20_000
"""Tokens of a request, at most: of a few long ones chance decides which are there."""
ANSWER_TOKENS = 16
"""Tokens of an answer, at most: what displaces blocks is what is read, and short answers take fewer steps."""
LOAD = 0.6
"""So many tokens come, of those that the engine can compute."""
PARTS = 8
SEGMENT_BYTES = GIB
SHORT = (40, 8000, 3)
"""The same numbers of requests, tokens and parts in the short form."""


@dataclass(frozen=True)
class SweepWork:
    """Requests in parts, before each of which but the first the engine forgets its own cache, and what of them does not
    depend on a pool."""

    parts: Sequence[Sequence[Ask]]
    passages: Sequence[Passage]
    """The requests by arrival; room is 0 where the engine forgets, and without bounds elsewhere."""
    groups: Sequence[tuple[GroupRule, int]]
    hash_size: int
    alignment: int
    alone: int
    """Tokens that the engine hits without a pool."""
    all_bytes: int
    """Bytes of all blocks that are computed, each once."""

    def size_pool(self, percent: float) -> int:
        """Returns so many percent of all bytes, in whole segments: that is what a server takes."""
        return max(round(self.all_bytes * percent / 100 / SEGMENT_BYTES), 1) * SEGMENT_BYTES

    def find_bound(self, pool_bytes: int, engine_bytes: int) -> HitBound:
        passages = [
            replace(one, room_bytes=pool_bytes + (engine_bytes if one.room_bytes else 0)) for one in self.passages
        ]
        return HitBound(self.groups, passages, unit=self.hash_size, step=self.alignment)


def sweep(model: Model, ground: Ground) -> Iterator[Result]:
    """Conversations with 20 to 2 times what the pool can hold, at 0.6; the engine forgets its own cache seven times."""
    work = prepare_sweep(model, ground)
    for percent in ground.pools:
        yield from _measure_pool(model, work, percent, work.size_pool(percent))


def prepare_sweep(model: Model, ground: Ground) -> SweepWork:
    """Serves the work with a pool that can hold nothing."""
    requests, tokens, count = SHORT if ground.is_short else (REQUESTS, MOST_TOKENS, PARTS)
    asks = [
        replace(ask, answer=ask.answer[:ANSWER_TOKENS])
        for ask in read_conversations(ground.find_trace(), limit=requests)
        if ask.tokens <= tokens
    ]
    parts = cut(come_at(asks, tokens_per_s=LOAD * StepCost(model).prefill_rate()), count)
    with open_ideal(model, EngineSettings(), pool_bytes=1) as engine:
        run = serve_parts(engine, parts)
        connector: Any = engine.scheduler.connector
    alignment, hash_size = connector.alignment, connector.hash_size
    assert not sum(one.external_tokens for one in run.served)
    by_name = {one.ask.name: one for one in run.served}
    passages = []
    for part in parts:
        arrived = sorted((by_name[ask.name] for ask in part), key=lambda one: one.arrived_s)
        for at, one in enumerate(arrived, 1):
            limit = (len(one.ask.prompt) - 1) // alignment * alignment
            names = [bytes(name) for name in one.request.block_hashes]
            # vLLM hands off the states at the ends of prompts, and no others.
            passages.append(Passage(names, limit, 0 if at == len(arrived) else inf, (limit,)))
    all_bytes = 0
    for rule, size_bytes in zip(connector.rules, connector.record_bytes, strict=True):
        per_block = rule.block_size // hash_size
        if rule.reuse is ReuseRule.EXACT_BOUNDARY:
            found = {one.names[one.limit // hash_size - 1] for one in passages if one.limit}
        else:
            found = {name for one in passages for name in one.names[per_block - 1 :: per_block]}
        all_bytes += size_bytes * len(found)
    groups = list(zip(connector.rules, connector.record_bytes, strict=True))
    return SweepWork(parts, passages, groups, hash_size, alignment, count_hits(run), all_bytes)


def _measure_pool(model: Model, work: SweepWork, percent: float, pool_bytes: int) -> Iterator[Result]:
    with open_ours(model, EngineSettings(), pool_bytes=pool_bytes, segment_bytes=SEGMENT_BYTES) as engine:
        ledger = PoolLedger(engine)
        ledger.watch(engine)
        ours = serve_parts(engine, work.parts)
        left = {name: count for name, count in count_left(engine).items() if count}
    is_alike = all(rule.reuse is ReuseRule.PREFIX for rule, _ in work.groups)
    ideals: dict[str, Run] = {}
    for name in ("all",) if is_alike else ("all", "lean"):
        with open_ideal(model, EngineSettings(), pool_bytes=pool_bytes, is_lean=name == "lean") as engine:
            ideals[name] = serve_parts(engine, work.parts)
    hits, its = count_hits(ours), {name: count_hits(run) for name, run in ideals.items()}
    best = max(its, key=its.__getitem__)
    bound = work.find_bound(pool_bytes, model.cache_bytes * model.ranks)
    most = bound.count()
    params: dict[str, int | float | str] = {
        "model": model.name,
        "scenario": "sweep",
        "percent": percent,
        "pool_mib": pool_bytes // MIB,
        "all_mib": work.all_bytes // MIB,
        "requests": len(ours.served),
        "prompt_tokens": sum(count_tokens(part) for part in work.parts),
        "alone": work.alone,
        "all_hits": bound.all_tokens,
        "bound": most,
        "ideal": best,
        **{f"{name}_ideal": found for name, found in its.items()},
    }
    yield from compare_runs(ours, ideals[best], params)
    yield _row("tokens hit, of the bound", hits, most, params, Goal(Measure.RATIO, Bound.AT_MOST, 1.0))
    yield _row("ideal's tokens hit, of the bound", its[best], most, params, Goal(Measure.RATIO, Bound.AT_MOST, 1.0))
    only = Goal(Measure.RATIO, Bound.AT_LEAST, 0.95)
    yield _row("tokens that only the pool brings", hits - work.alone, its[best] - work.alone, params, only)
    ledger.add(ours.served)
    wanted = {one.ask.name: one.cached_tokens for one in ideals[best].served}
    lost = dict(ledger.explain(ours.served, wanted).most_common())
    gained = sum(max(one.cached_tokens - wanted[one.ask.name], 0) for one in ours.served)
    yield _row("tokens lost", sum(lost.values()), its[best], {**params, "gained": gained, **lost}, None)
    yield _row("left at the end", sum(left.values()), 1, {**params, **left}, Goal(Measure.VALUE, Bound.AT_MOST, 0))


def _row(name: str, value: int, limit: int, params: dict[str, int | float | str], goal: Goal | None) -> Result:
    return Result(name=name, value=value, limit=max(limit, 1), unit="tokens", spread=0.0, goal=goal, params=params)

"""The scenarios that each model runs on the proving ground, and their figures with goals."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from benchmarks.ground.accelerator import StepCost
from benchmarks.ground.engine import Run, VirtualEngine
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.figures import compare_runs, count_hits, find_percentile, serve_parts
from benchmarks.ground.ledger import PoolLedger, Share, watch_evictions
from benchmarks.ground.models import SHAPES, Model
from benchmarks.ground.others import compare_others
from benchmarks.ground.pool_sweep import sweep
from benchmarks.ground.server import SEGMENT_BYTES, count_left
from benchmarks.ground.shared_prefix import share_prefix
from benchmarks.ground.trial import ROOM, open_bare, open_ideal, open_ours
from benchmarks.ground.work import (
    CONVERSATIONS_SEED,
    Ask,
    come_at,
    count_tokens,
    cut,
    make_agents,
    make_fresh,
    mix_agents,
    read_conversations,
    repeat,
    write_conversations,
)
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.units import GIB, MIB

Params = dict[str, int | float | str]
SMALL_POOL = 64 * MIB
BACKLOG: Mapping[str, Any] = {"tokens": 8192, "new_tokens": 128, "per_s": 0, "seed": 5}
NO_BACKLOG: Mapping[str, Any] = {"tokens": 8, "new_tokens": 128, "per_s": 0, "seed": 6}
"""They fill less than a block before the others end."""
LOADS = (0.3, 0.6, 1.2)
"""How many tokens come, of those that the engine can compute: up to saturation."""
PARTS = 4
"""Conversations are cut into so many; between them the engine's own cache is reset."""
SHORT_TOKENS = 20_000
AGENTS, TURNS = 4, 5
"""Sessions among conversations, and turns of each."""
SESSIONS = 800
"""About so many requests of conversations come among the sessions."""
POOL_TOKENS_PER_REQUEST = 320
"""So large is the pool, for each of these requests: it has a twentieth of what they read."""
AGENTS_SHARE = 1 / 3
"""Agents' sessions have so much of the pool at their ends: a little less than a server retains for one user."""
SHARED_POOL = 256 * GIB
"""The pool of conversations and agents, for our connector and for the ideal one."""


@dataclass
class Ground:
    """The options of a run of the benchmark, and the runs from which its pictures are drawn."""

    folder: Path
    trace: Path | None = None
    is_short: bool = False
    seed: int = CONVERSATIONS_SEED
    """Seed of the conversations that are made up."""
    pools: Sequence[float] = (5, 10, 20, 50)
    """The pools of a sweep, in percent of what is computed: one size alone may suit a policy by chance."""
    scenarios: Sequence[str] = ()
    """The names of the wanted scenarios; none: all."""
    runs: dict[str, Run] = field(default_factory=dict)
    """The run of our connector for each model: conversations, or the only scenario that ran."""

    def find_trace(self) -> Path:
        """Returns the given trace, or makes one."""
        if self.trace is None:
            self.trace = self.folder / "conversations.jsonl"
            write_conversations(self.trace, requests=400, seed=self.seed)
        return self.trace


def measure_model(model: Model, ground: Ground, progress: Progress) -> Iterator[Result]:
    """Every scenario of one model."""
    # A scenario that is asked for by name need not be quick.
    for scenario in (*ALL, *BY_NAME) if ground.scenarios else SHORT if ground.is_short else ALL:
        if ground.scenarios and scenario.__name__ not in ground.scenarios:
            continue
        progress(f"{model.name}: {(scenario.__doc__ or '').splitlines()[0].rstrip('.').lower()}")
        yield from scenario(model, ground)


# ---- scenarios ----


def save_all(model: Model, ground: Ground) -> Iterator[Result]:
    """Prompts of a whole step each, saved as they fill, and asked for again when the engine has forgotten them."""
    asks = make_fresh(12 if ground.is_short else 32, tokens=8192, new_tokens=64, per_s=0)
    for settings in _shapes(ground):
        params: Params = {"model": model.name, "scenario": "eager", **_describe(settings)}
        is_first = settings == EngineSettings()
        with open_ours(model, settings) as engine:
            first = engine.serve(asks)
            ledger = PoolLedger(engine)
            ledger.add(first.served)
            saved = ledger.count_saved()
            assert engine.forget()
            again = engine.serve(repeat(asks, from_s=0, new_tokens=16))
            left = count_left(engine)
        if model.name not in ground.runs:
            ground.runs[model.name] = Run()
            for run in (first, again):
                ground.runs[model.name].append(run)
        yield _share("saved", saved, 0.995, params)
        yield _left(left, params)
        yield from _worker_times(first, params)
        if is_first:
            with open_ideal(model, settings) as engine:
                engine.serve(asks)
                assert engine.forget()
                yield from compare_runs(again, engine.serve(repeat(asks, from_s=0, new_tokens=16)), params)


def save_before_eviction(model: Model, ground: Ground) -> Iterator[Result]:
    """Saved when the engine is about to take the block: 512 and 1,024 blocks of 16 tokens in a step."""
    for step_tokens in (16384,) if ground.is_short else (8192, 16384):
        settings = EngineSettings(step_tokens=step_tokens)
        params: Params = {"model": model.name, "scenario": "on_evict", "step_tokens": step_tokens}
        with open_ours(model, settings, settings={"save_policy": "on_evict"}) as engine:
            log = watch_evictions(engine)
            per_prompt = _blocks_of(engine, step_tokens)
            blocks = engine.config.scheduler.num_blocks
            count = int(1.5 * blocks / per_prompt) + 8
            # Steps are so long that the link can carry all saves.
            asks = make_fresh(count, tokens=step_tokens, new_tokens=1, per_s=0)
            run = engine.serve(asks)
            ledger = PoolLedger(engine)
            ledger.add(run.served)
            taken = ledger.count_taken(log)
            left = count_left(engine)
        params["blocks_a_step"] = per_prompt
        assert taken.of, "the engine has room for all"
        yield _share("saved before taken", taken, 0.99, params)
        yield from _scheduler_times(run, params)
        yield _left(left, params)


def keep_up(model: Model, ground: Ground) -> Iterator[Result]:
    """256 requests running while prompts of 100,000 tokens come in chunks of 8k."""
    asks = make_fresh(256, tokens=1500, new_tokens=160, per_s=0, seed=3)
    asks += make_fresh(3, tokens=100_000, new_tokens=8, per_s=0.5, seed=4)
    for settings in (EngineSettings(), EngineSettings(runner=1)):
        params: Params = {"model": model.name, "scenario": "256 running", **_describe(settings)}
        with open_ours(model, settings) as engine:
            run = engine.serve(asks)
            left = count_left(engine)
        if settings.runner == 2:
            yield from _scheduler_times(run, params)
        yield from _worker_times(run, params)
        yield _left(left, params)


def carry_backlog(model: Model, ground: Ground) -> Iterator[Result]:
    """64 requests decode, and the prompt of one or of all of them, 512 blocks of 16 tokens, has found no room."""
    times = {
        count: _time_decoding(model, [*make_fresh(count, **BACKLOG), *make_fresh(64 - count, **NO_BACKLOG)], SMALL_POOL)
        for count in (1, 64)
    }
    room = _time_decoding(model, make_fresh(64, **BACKLOG), ROOM)
    yield Result(
        name="scheduler with a backlog",
        value=times[64],
        limit=times[1],
        unit="ms",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.2),
        params={"model": model.name, "scenario": "backlog", "tokens": 64 * 8192, "without_ms": round(room, 3)},
    )


def _time_decoding(model: Model, asks: Sequence[Ask], pool_bytes: int) -> float:
    """The scheduler's thread in a step, in the mean, while all requests that fit decode and none begins or ends.

    Of some models a prompt's backlog is saved after 50 such steps, so only the first ones count.
    """
    with open_ours(model, EngineSettings(), pool_bytes=pool_bytes) as engine:
        run = engine.serve(asks)
    steps = [step for step in run.steps if step.tokens == step.requests]
    most = max(step.requests for step in steps)
    return statistics.fmean([step.scheduler_ms for step in steps if step.requests == most][:48])


def divide(model: Model, ground: Ground) -> Iterator[Result]:
    """Prompts of a whole step each, on other ranks and stages than most have: each byte is kept once."""
    asks = make_fresh(6 if ground.is_short else 16, tokens=8192, new_tokens=64, per_s=0)
    for shape in SHAPES.get(model.name, ()):
        if ground.is_short and shape.nodes > 1:
            continue  # what is asked of them takes real time
        params: Params = {"model": model.name, "scenario": "shape", **_describe_shape(shape)}
        with open_ours(shape, EngineSettings()) as engine:
            first = engine.serve(asks)
            ledger = PoolLedger(engine)
            ledger.add(first.served)
            saved, distinct = ledger.count_saved(), ledger.count_bytes(engine.machine.record_bytes)
            links = [copies.all_saved_bytes for copies in engine.machine.engines.values()]
            compared = sum(rank.connector.worker_side.compared_bytes for rank in engine.ranks)
            assert engine.forget()
            again = engine.serve(repeat(asks, from_s=0, new_tokens=16))
            left = count_left(engine)
        yield _share("saved", saved, 0.995, params)
        yield Result(
            name="bytes stored of each",
            value=sum(links) - compared,
            limit=distinct,
            unit="bytes",
            spread=0.0,
            goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.0),
            params={**params, "compared": compared},
        )
        yield Result(
            name="bytes over the busiest link",
            value=max(links),
            limit=sum(links) / len(links),
            unit="bytes",
            spread=0.0,
            goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.25),
            params=params,
        )
        with open_ideal(shape, EngineSettings()) as engine:
            engine.serve(asks)
            assert engine.forget()
            yield from compare_runs(again, engine.serve(repeat(asks, from_s=0, new_tokens=16)), params)
        yield from _scheduler_times(first, params)
        yield from _worker_times(first, params)
        yield _left(left, params)
        if shape.nodes > 1:
            yield from compute_all(shape, ground)


def serve_conversations(model: Model, ground: Ground) -> Iterator[Result]:
    """Conversations at 0.3 to 1.2 of the tokens a second that it can compute; it forgets its own cache three times."""
    asks = _read_conversations(model, ground)
    rate = StepCost(model).prefill_rate()
    for load in LOADS:
        params: Params = {"model": model.name, "scenario": "conversations", "load": load, "requests": len(asks)}
        parts = cut(come_at(asks, tokens_per_s=load * rate), PARTS)
        yield from _serve_beside_ideal(model, ground, parts, params, is_pictured=load == LOADS[1])


def serve_agents(model: Model, ground: Ground) -> Iterator[Result]:
    """Sessions of 40 turns that grow from 40,000 tokens to 120,000, with tool outputs of 2k."""
    asks = make_agents(5, turns=40, first_tokens=40_000, tool_tokens=1840, new_tokens=160, think_s=5.0)
    params: Params = {"model": model.name, "scenario": "agents", "requests": len(asks)}
    yield from _serve_beside_ideal(model, ground, [asks], params)


def keep_sessions(model: Model, ground: Ground) -> Iterator[Result]:
    """Agents among conversations that fill the pool twice between their turns, with and without hints."""
    size = SESSIONS // 2 if ground.is_short else SESSIONS
    trace = ground.folder / "sessions.jsonl"
    write_conversations(trace, requests=size)
    # Short answers: what displaces others is what is read.
    asks = [
        replace(ask, answer=ask.answer[:16])
        for ask in read_conversations(trace, limit=size)
        if ask.tokens <= SHORT_TOKENS
    ]
    others = cut(come_at(asks, tokens_per_s=LOADS[1] * StepCost(model).prefill_rate()), TURNS)
    pool_tokens = size * POOL_TOKENS_PER_REQUEST
    pool_bytes = max(round(pool_tokens * _count_token_bytes(model) / SEGMENT_BYTES), 1) * SEGMENT_BYTES
    # At their ends the sessions have so much of the pool.
    last_tokens = int(AGENTS_SHARE * pool_tokens / AGENTS)
    turn_tokens = last_tokens // (2 * TURNS)
    agents = make_agents(
        AGENTS,
        turns=TURNS,
        first_tokens=last_tokens - TURNS * turn_tokens,
        tool_tokens=turn_tokens - turn_tokens // 8,
        new_tokens=turn_tokens // 8,
        think_s=1.0,
    )
    settings = EngineSettings(step_tokens=2048)
    params: Params = {"model": model.name, "scenario": "sessions", "pool_mib": pool_bytes // MIB, "agents": AGENTS}
    plain, named = mix_agents(others, agents), mix_agents(others, agents, ttl_s=3600.0)
    runs = {}
    for name, parts in (("without", plain), ("with", named)):
        with open_ours(model, settings, pool_bytes=pool_bytes) as engine:
            runs[name] = serve_parts(engine, parts)
            left = count_left(engine)
    for name, size_bytes in (("ideal", pool_bytes), ("all", ROOM)):
        with open_ideal(model, settings, pool_bytes=size_bytes) as engine:
            runs[name] = serve_parts(engine, plain)
    hits = {name: _divide_hits(run) for name, run in runs.items()}
    params |= {"agent_turns": len(agents), "requests": len(agents) + len(asks)}
    yield Result(
        name="sessions' tokens hit",
        value=hits["with"][0],
        limit=max(hits["all"][0], 1),
        unit="tokens",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_LEAST, 0.85),
        params={**params, "without": hits["without"][0], "ideal": hits["ideal"][0]},
    )
    yield Result(
        name="others' tokens hit",
        value=hits["with"][1],
        limit=max(hits["without"][1], 1),
        unit="tokens",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_LEAST, 1 - AGENTS_SHARE),
        params={**params, "ideal": hits["ideal"][1], "all": hits["all"][1]},
    )
    without_ms = statistics.fmean(step.scheduler_ms for step in runs["without"].steps)
    yield from _scheduler_times(runs["with"], {**params, "without_ms": round(without_ms, 3)})
    yield _left(left, params)


def _count_token_bytes(model: Model) -> float:
    """Returns what a token of a prompt takes of a pool."""
    with open_ideal(model, EngineSettings(), pool_bytes=ROOM) as engine:
        engine.serve(make_fresh(1, tokens=8192, new_tokens=64, per_s=0))
        connector: Any = engine.scheduler.connector
        return float(connector.pool.used_bytes) / 8192


def _divide_hits(run: Run) -> tuple[int, int]:
    """Tokens hit of agents, and of others."""
    agents = sum(one.cached_tokens for one in run.served if one.ask.name.startswith("agent-"))
    return agents, count_hits(run) - agents


def compute_all(model: Model, ground: Ground) -> Iterator[Result]:
    """Nothing is reused: what the connector costs in output tokens a second."""
    asks = make_fresh(64 if ground.is_short else 160, tokens=2000, new_tokens=200, per_s=0, seed=6)
    params: Params = {"model": model.name, "scenario": "nothing reused", **_describe_shape(model)}
    with open_ours(model, EngineSettings()) as engine:
        ours = engine.serve(asks)
        left = count_left(engine)
    with open_bare(model, EngineSettings()) as engine:
        bare = engine.serve(asks)
    yield Result(
        name="output tokens a second",
        value=ours.output_tokens / ours.seconds,
        limit=bare.output_tokens / bare.seconds,
        unit="/s",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_LEAST, 0.99),
        params=params,
    )
    yield _left(left, params)


def _read_conversations(model: Model, ground: Ground) -> list[Ask]:
    asks = read_conversations(ground.find_trace(), limit=160)
    return [ask for ask in asks if ask.tokens <= model.max_model_len]


Scenario = Callable[[Model, Ground], Iterator[Result]]
SHORT: Sequence[Scenario] = (save_all, save_before_eviction, carry_backlog, divide, compute_all)
ALL: Sequence[Scenario] = (
    save_all,
    save_before_eviction,
    keep_up,
    carry_backlog,
    share_prefix,
    divide,
    serve_conversations,
    sweep,
    serve_agents,
    keep_sessions,
    compute_all,
)
BY_NAME: Sequence[Scenario] = (compare_others,)
"""They run only if they are asked for."""


# ---- figures ----


def _shapes(ground: Ground) -> Sequence[EngineSettings]:
    """Ways to run an engine: the first one is what most have."""
    if ground.is_short:
        return (EngineSettings(), EngineSettings(runner=1))
    return (
        EngineSettings(),
        EngineSettings(runner=1),
        EngineSettings(is_async=False),
        EngineSettings(drafts=3),
        EngineSettings(runner=1, drafts=3),
    )


def _describe(settings: EngineSettings) -> Params:
    return {"runner": settings.runner, "async": int(settings.is_async), "drafts": settings.drafts}


def _describe_shape(model: Model) -> Params:
    shape = {"ranks": model.ranks, "stages": model.stages, "nodes": model.nodes}
    return {**shape, "context_ranks": model.context_ranks} if model.context_ranks > 1 else shape


def _serve_beside_ideal(
    model: Model,
    ground: Ground,
    parts: Sequence[Sequence[Ask]],
    params: Params,
    *,
    pool_bytes: int = SHARED_POOL,
    is_pictured: bool = False,
) -> Iterator[Result]:
    """Before each part but the first, the engine's own cache is reset."""
    opened: list[AbstractContextManager[VirtualEngine]] = [
        open_ours(model, EngineSettings(), pool_bytes=pool_bytes),
        open_ideal(model, EngineSettings(), pool_bytes=pool_bytes),
    ]
    with opened[0] as engine:
        ours = serve_parts(engine, parts)
        left = count_left(engine)
    if is_pictured:
        ground.runs[model.name] = ours
    with opened[1] as engine:
        ideal = serve_parts(engine, parts)
    params = {**params, "prompt_tokens": sum(count_tokens(part) for part in parts)}
    yield from compare_runs(ours, ideal, params)
    yield from _scheduler_times(ours, params)
    yield _left(left, params)


def _share(name: str, share: Share, goal: float, params: Params) -> Result:
    return Result(
        name=name,
        value=share.count,
        limit=max(share.of, 1),
        unit="blocks",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_LEAST, goal),
        params=params,
    )


def _left(left: dict[str, int], params: Params) -> Result:
    """Names everything that is left."""
    found: Params = {name: count for name, count in left.items() if count}
    return Result(
        name="left at the end",
        value=sum(left.values()),
        limit=1,
        unit="",
        spread=0.0,
        goal=Goal(Measure.VALUE, Bound.AT_MOST, 0),
        params={**params, **found},
    )


def _scheduler_times(run: Run, params: Params) -> Iterator[Result]:
    """CPU time of the thread: this machine is shared, so a clock on the wall tells of its neighbours. Beside vLLM's."""
    mine = [step.scheduler_ms for step in run.steps]
    its = [step.engine_ms for step in run.steps]
    wall = [step.scheduler_wall_ms for step in run.steps]
    parts: tuple[tuple[str, Callable[[Sequence[float]], float], float], ...] = (
        ("mean", statistics.fmean, 0.3),
        ("p99", lambda values: find_percentile(values, 99), 1.0),
    )
    for name, reduce, goal in parts:
        yield Result(
            name=f"scheduler's thread a step, {name}",
            value=reduce(mine),
            limit=reduce(its),
            unit="ms",
            spread=0.0,
            goal=Goal(Measure.VALUE, Bound.AT_MOST, goal),
            params={**params, "wall_ms": round(reduce(wall), 3), "steps": len(run.steps)},
        )


def _worker_times(run: Run, params: Params) -> Iterator[Result]:
    """Of the slowest rank, and its waits in virtual time, in steps that compute something."""
    steps = [step for step in run.steps if step.tokens]
    for name, values, goal in (
        ("worker's thread a step", [step.worker_ms for step in steps], 0.1),
        ("worker's wait a step", [step.waited_ms for step in steps], 0.0),
    ):
        yield Result(
            name=f"{name}, mean",
            value=statistics.fmean(values),
            limit=statistics.fmean([step.seconds * 1e3 for step in steps]),
            unit="ms",
            spread=0.0,
            goal=Goal(Measure.VALUE, Bound.AT_MOST, goal),
            params={**params, "p99": round(find_percentile(values, 99), 3)},
        )


def _blocks_of(engine: VirtualEngine, tokens: int) -> int:
    """That a prompt of so many tokens keeps: those of full attention, since windows and states move on."""
    groups = engine.config.scheduler.kv_cache_groups
    sizes = [
        g.kv_cache_spec.block_size for g in groups if type(g.kv_cache_spec) in (FullAttentionSpec, MLAAttentionSpec)
    ]
    return sum(tokens // size for size in sizes)

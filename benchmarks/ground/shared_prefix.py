"""The scenario of requests that come at once with one prefix, which the engine has forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from benchmarks.ground.engine import Run
from benchmarks.ground.engine_config import EngineSettings
from benchmarks.ground.models import Model
from benchmarks.ground.server import count_left
from benchmarks.ground.trial import open_ours
from benchmarks.ground.work import make_sharing
from kvoffload.bench.base import Bound, Goal, Measure, Result

if TYPE_CHECKING:
    from benchmarks.ground.scenarios import Ground

SHARING = 64
"""Number of requests that come at once with the same prefix."""


def share_prefix(model: Model, ground: Ground) -> Iterator[Result]:
    """64 requests begin with the same 32,000 tokens, which the engine has forgotten: all at once, and one alone."""
    params: dict[str, int | float | str] = {"model": model.name, "scenario": "shared prefix", "requests": SHARING}
    runs: dict[str, Run] = {}
    loaded = [0]
    with open_ours(model, EngineSettings(), settings={"load_policy": "always"}) as engine:
        engine.serve(make_sharing(1, seed=1))
        for number, (name, count) in enumerate(
            (("one", 1), ("one, warm", 1), ("all", SHARING), ("all, warm", SHARING))
        ):
            if "warm" not in name:
                assert engine.forget()
            runs[name] = engine.serve(make_sharing(count, seed=2 + number))
            loaded.append(sum(copies.all_loaded_bytes for copies in engine.machine.engines.values()))
        assert not any(count_left(engine).values())
    slowest = {name: max(one.ttft_s for one in run.served) * 1e3 for name, run in runs.items()}
    # With states each request loads (decision 81).
    is_loaded_once = "mamba_cache_mode" not in model.extra
    yield Result(
        name="bytes loaded",
        value=loaded[4] - loaded[1],
        limit=loaded[1],
        unit="bytes",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.0) if is_loaded_once else None,
        params=params,
    )
    # Computing the ends of 64 prompts takes longer than computing one, also if nothing is loaded.
    yield Result(
        name="ttft, p99",
        value=slowest["all"],
        limit=slowest["one"] + slowest["all, warm"] - slowest["one, warm"],
        unit="ms",
        spread=0.0,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.2),
        params={**params, **{f"{name}_ms": round(found, 1) for name, found in slowest.items()}},
    )

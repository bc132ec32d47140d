"""A picture of a run: tokens hit, blocks' way, and how long steps took; the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ground.engine import Run

BINS = 60
_HITS, _ASKED, _STEPS, _HOOKS = "#00798c", "#bbbbbb", "#30638e", "#d1495b"


def draw_run(model: str, run: Run, folder: Path) -> None:
    """Into an existing folder, or one that is made."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "kvoffload", "svg.fonttype": "none", "font.size": 9, "axes.grid": True})
    mpl.rcParams.update({"grid.alpha": 0.3, "axes.spines.top": False, "axes.spines.right": False})
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    figure, (tokens, saves, times) = pyplot.subplots(1, 3, figsize=(11.0, 3.0))
    width_s = max(run.seconds, 1e-9) / BINS
    at = [(number + 0.5) * width_s for number in range(BINS)]
    begun_s = run.served[0].arrived_s - run.served[0].ask.arrival_s if run.served else 0.0
    firsts = [one.first_s - begun_s for one in run.served]
    asked = _sum_bins(firsts, [len(one.ask.prompt) / 1e3 for one in run.served], width_s)
    hit = _sum_bins(firsts, [one.cached_tokens / 1e3 for one in run.served], width_s)
    tokens.bar(at, asked, width_s, color=_ASKED, label="prompts")
    tokens.bar(at, hit, width_s, color=_HITS, label="of them hit")
    tokens.set_title("thousand tokens, by when they were there", loc="left")
    tokens.legend(frameon=False)
    every = [step.begun_s for step in run.steps]
    saves.plot(at, _accumulate(_sum_bins(every, [step.saved_bytes / 1e9 for step in run.steps], width_s)), color=_HITS)
    saves.set_title("saved, GB of all ranks", loc="left")
    saves.set_ylim(bottom=0)
    busy = [step for step in run.steps if step.tokens]
    starts = [step.begun_s for step in busy]
    counts = _sum_bins(starts, [1.0] * len(busy), width_s)
    for show, color in ((lambda step: step.seconds * 1e3, _STEPS), (lambda step: step.scheduler_ms, _HOOKS)):
        sums = _sum_bins(starts, [show(step) for step in busy], width_s)
        # A bin without a step has no mean.
        means = [total / count if count else None for total, count in zip(sums, counts, strict=True)]
        times.plot(at, means, color=color, marker=".", markersize=3)
    times.set_yscale("log")
    times.set_title("mean ms: steps (blue), our part of the thread (red)", loc="left")
    for axes in (tokens, saves, times):
        axes.set_xlabel("seconds")
    figure.suptitle(model, x=0.01, ha="left")
    figure.tight_layout()
    figure.savefig(folder / f"scale-{model}.svg", metadata={"Date": None})
    pyplot.close(figure)


def _sum_bins(at_s: Sequence[float], values: Sequence[float], width_s: float) -> list[float]:
    sums = [0.0] * BINS
    for time_s, value in zip(at_s, values, strict=True):
        sums[min(max(int(time_s / width_s), 0), BINS - 1)] += value
    return sums


def _accumulate(values: Sequence[float]) -> Any:
    from itertools import accumulate

    return list(accumulate(values))

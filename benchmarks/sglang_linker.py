"""The linker on a real SGLang engine: time to first token of a restored prompt, what it costs where nothing is reused,
and its look-ups.

It needs the environment that `make sglang` sets up: `.venv-sglang/bin/python -m benchmarks.sglang_linker`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.connectors.model import VOCABULARY
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.measure import spread_of, summarize_pairs
from kvoffload.sglang import weights
from kvoffload.sglang.page_linker import GroupRows, PageLinker
from kvoffload.sglang.start_up import start_linker
from tests.kit.sglang.linked import make_keys
from tests.kit.sglang.pools import PAGE as KIT_PAGE
from tests.kit.sglang.pools import MHATokenToKVPool, rows_of
from tests.sglang.engine import PAGE, SGLangEngine
from tests.sglang.shared_records import observed
from tests.vllm.cache_server import SharedServer

ROOT = Path(__file__).resolve().parents[1]
PROMPT = 4096
COLD_PROMPT = 1024
ROUNDS = 10
LOOKUP_PAGES = 256
FIRST_TOKEN = 3
ENGINE = {
    "max_total_tokens": 4 * PROMPT,
    "chunked_prefill_size": 2 * PROMPT,
    "context_length": 2 * PROMPT,
    # The other engine must not take a core while it has nothing to do.
    "sleep_on_idle": True,
    "log_level": "warning",
}
BUILD = "import sys, pathlib; from benchmarks.connectors.model import build; build(pathlib.Path(sys.argv[1]))"


@dataclass(frozen=True)
class Options:
    """The options of one run."""

    prompt: int
    rounds: int


def make_prompt(seed: int, tokens: int) -> list[int]:
    """Those of different seeds share no page."""
    return random.Random(seed).choices(range(FIRST_TOKEN, VOCABULARY), k=tokens)


def measure_ttft(folder: Path, progress: Progress, options: Options) -> Iterator[Result]:
    """A prompt that the engine has, and the same when it was flushed, in turn."""
    progress("first token of a restored prompt")
    pages = options.prompt // PAGE - 1
    with SharedServer(folder, memory="2GiB") as server:
        server.start()
        settings = {"server": str(server.socket), "memory": "2GiB"}
        with (
            SGLangEngine(_build(folder), folder / "log", linker=settings, **ENGINE) as engine,
            observed(server) as observer,
        ):
            engine.time(make_prompt(1, PAGE), new_tokens=1)  # warms up
            prompt = make_prompt(2, options.prompt)
            cold_s, _ = engine.time(prompt, new_tokens=1)
            observer.await_pages(pages)
            own, restored = [], []
            for _ in range(options.rounds):
                own_s, (hit,) = engine.time(prompt, new_tokens=1)
                engine.flush()
                restored_s, (back,) = engine.time(prompt, new_tokens=1)
                assert (hit.own, back.own, back.restored) == (pages * PAGE, 0, pages * PAGE), (hit, back)
                own.append(own_s)
                restored.append(restored_s)
    pair = summarize_pairs(restored, own)
    yield Result(
        name="ttft of a restored prompt",
        value=pair.value_s * 1e3,
        limit=pair.limit_s * 1e3,
        unit="ms",
        spread=pair.spread,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.1),
        params={
            "prompt": options.prompt,
            "limit_is": "own hit",
            "fastest_ms": round(min(restored) * 1e3, 1),
            "fastest_own_ms": round(min(own) * 1e3, 1),
            "cold_ms": round(cold_s * 1e3),
        },
    )


def measure_no_reuse(folder: Path, progress: Progress, options: Options) -> Iterator[Result]:
    """Runs new prompts in turn on an engine with the linker, which saves them, and on one without it."""
    progress("first token where nothing is reused")
    model = _build(folder)
    with SharedServer(folder, memory="2GiB") as server:
        server.start()
        settings = {"server": str(server.socket), "memory": "2GiB"}
        linked = SGLangEngine(model, folder / "linked.log", linker=settings, **ENGINE)
        plain = SGLangEngine(model, folder / "plain.log", **ENGINE)
        with linked, plain:
            with_us, without = [], []
            for seed in range(1 + options.rounds):
                prompt = make_prompt(seed, COLD_PROMPT)
                for engine, seconds in ((linked, with_us), (plain, without))[:: 1 if seed % 2 else -1]:
                    spent_s, (told,) = engine.time(prompt, new_tokens=1)
                    assert (told.own, told.restored) == (0, 0), told
                    seconds.append(spent_s)
    pair = summarize_pairs(with_us[1:], without[1:])
    yield Result(
        name="ttft, no reuse",
        value=pair.value_s * 1e3,
        limit=pair.limit_s * 1e3,
        unit="ms",
        spread=pair.spread,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.01),
        params={
            "prompt": COLD_PROMPT,
            "limit_is": "an engine without the linker",
            "fastest_ratio": round(min(with_us) / min(without), 4),
        },
    )


def measure_lookups(folder: Path, progress: Progress, options: Options) -> Iterator[Result]:
    """Times look-ups by the engine's thread: of pages of which none is there, and of pages that are, at a request's
    first look and at its next ones."""
    progress("look-ups")
    with SharedServer(folder, memory="64MiB", segment_size="64MiB") as server:
        server.start()
        linker = _open_linker(server.socket)
        keys, others = make_keys(LOOKUP_PAGES), make_keys(LOOKUP_PAGES, seed=1)
        _save(linker, keys)
        cases: list[tuple[str, Callable[[], int], int]] = [
            ("miss", lambda: len(linker.lookup("miss", others)), 0),
            ("hit, with its lease", lambda: len(linker.lookup("new", keys)), LOOKUP_PAGES),
            ("hit, looked up again", lambda: len(linker.lookup("same", keys)), LOOKUP_PAGES),
        ]
        for case, look, expected in cases:
            times_us = []
            for _ in range(100 * options.rounds):
                linker.begin_step()
                begun_ns = time.perf_counter_ns()
                found = look()
                times_us.append((time.perf_counter_ns() - begun_ns) / 1e3)
                assert found == expected, (case, found)
                # As when its load is over: its lease is given back.
                linker.cancel_load("new")
            yield Result(
                name="look-up",
                value=statistics.median(times_us),
                limit=20.0,
                unit="us",
                spread=spread_of(times_us),
                goal=Goal(Measure.VALUE, Bound.AT_MOST, 20.0),
                params={"pages": LOOKUP_PAGES, "case": case, "fastest_us": round(min(times_us), 1)},
            )
        linker.close()


def _build(folder: Path) -> Path:
    model = folder / "model"
    if not model.exists():
        subprocess.run([sys.executable, "-c", BUILD, str(model)], cwd=ROOT, check=True)
    return model


class Off:
    """An engine's arguments: each that is not given is off."""

    def __init__(self, **given: object) -> None:
        vars(self).update(given)

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _open_linker(socket: Path) -> PageLinker:
    """Over a pool of the kit: what is looked up is the server's."""
    model = torch.nn.Linear(8, 8)
    weights.find_models = lambda: [model]
    pool = MHATokenToKVPool(size=2 * LOOKUP_PAGES * KIT_PAGE)
    sizes = dict.fromkeys(("tp_size", "pp_size", "dp_size", "attn_dp_size", "attn_cp_size", "dcp_size", "nnodes"), 1)
    arguments = Off(model_path="made/up", revision="c" * 40, device="cpu", disaggregation_mode="null", **sizes)
    allocator = Off(get_kvcache=lambda: pool)
    params = Off(page_size=KIT_PAGE, token_to_kv_pool_allocator=allocator, swa_gates_prefix_match=True)
    settings = {"server": str(socket), "acquire_deadline": "5s", "step_budget": "1s"}
    linker, *_ = start_linker(
        arguments, params, components={Off(name="FULL")}, extra_config=settings, version="made up"
    )
    return linker


def _save(linker: PageLinker, keys: list[str]) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        linker.begin_step()
        linker.offload([GroupRows(0, keys, np.array(rows_of(*range(1, len(keys) + 1))))])
        linker.end_saves()
        # The server reads what it was told of the pages a moment later.
        if linker.pop_done() and len(linker.lookup("saved", keys)) == len(keys):
            linker.cancel_load("saved")
            return
        time.sleep(0.01)
    raise AssertionError("pages were not saved")


ROWS = {"ttft": measure_ttft, "no_reuse": measure_no_reuse, "lookup": measure_lookups}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default=",".join(ROWS), help="some of them, with commas between")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of each; a hundred look-ups in each of theirs")
    parser.add_argument("--prompt", type=int, default=PROMPT, help=f"tokens that are restored, at most {PROMPT}")
    given = parser.parse_args()
    options = Options(prompt=given.prompt, rounds=given.rounds)
    for row in given.rows.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for result in ROWS[row](Path(folder), _say, options):
                print(json.dumps(result.as_json()), flush=True)
    return 0


def _say(step: str) -> None:
    print(f"sglang_linker: {step}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

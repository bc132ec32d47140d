"""Counts of the engine's benchmarks, without a look at their measurements."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.connectors.accounting import HookClock
from benchmarks.connectors.engine_child import kvoffload, run_engine
from benchmarks.connectors.kept import Served, find_usable
from benchmarks.connectors.model import DENSE_86M, TOKEN_BYTES
from benchmarks.connectors.steps import LONGEST, SHORTEST, count_full, fit_steps, make_arrivals
from kvoffload.bench.child import Child
from kvoffload.cache import GroupRule
from kvoffload.kvspec import ReuseRule
from tests.vllm.connector_probe import PATIENCE
from tests.vllm.tiny_models import SLIDING

ROOT = Path(__file__).parents[2]
FULL = GroupRule(block_size=4, reuse=ReuseRule.PREFIX)
STATE = GroupRule(block_size=4, reuse=ReuseRule.EXACT_BOUNDARY)


def _served(text: str) -> Served:
    """Two groups whose blocks are named by letters."""
    names = tuple(letter.encode() for letter in text)
    return Served((names, names), 4 * len(names))


def _records(full: str, state: str) -> set[tuple[int, bytes]]:
    return {(group, letter.encode()) for group, text in enumerate((full, state)) for letter in text}


def test_what_no_boundary_needs_is_not_usable() -> None:
    kept = _records(full="abcd", state="b")
    assert find_usable([FULL, STATE], 4, [_served("abcd")], kept) == _records(full="ab", state="b")


def test_a_state_without_its_prefix_is_not_usable() -> None:
    assert find_usable([FULL, STATE], 4, [_served("abcd")], _records(full="acd", state="d")) == set()


def test_every_request_makes_its_own_prefixes_usable() -> None:
    kept = _records(full="abxy", state="bx")
    usable = find_usable([FULL, STATE], 4, [_served("abc"), _served("ax")], kept)
    assert usable == _records(full="abx", state="bx")


def test_the_plane_through_steps_has_their_slopes() -> None:
    seen = [(0, 0), (0, 0), (3, 1), (8, 0), (31, 2)]
    samples = [(blocks, new, 5e-6 + new * 9e-6 + blocks * 200e-9, int(not blocks)) for blocks, new in seen]
    fit = fit_steps(samples)
    assert fit.decode_us == pytest.approx(5)
    assert fit.intercept_us == pytest.approx(5)
    assert fit.request_us == pytest.approx(9)
    assert fit.block_ns == pytest.approx(200)


def test_a_block_is_new_in_the_step_that_fills_it() -> None:
    assert [count_full(0, 31), count_full(31, 1), count_full(32, 31), count_full(0, 65)] == [0, 1, 0, 2]


def test_all_requests_arrive() -> None:
    prompts = [prompt for arrivals in make_arrivals(1, 50) for prompt in arrivals]
    assert len(prompts) == 50
    assert all(SHORTEST <= len(prompt) <= LONGEST for prompt in prompts)


def test_a_hook_inside_a_hook_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    class Connector:
        scheduler_side: Any = None

        def outer(self) -> None:
            self.inner()

        def inner(self) -> None:
            nonlocal now
            now += 1

    monkeypatch.setattr(time, "thread_time", lambda: now)
    clock = HookClock()
    clock.watch(Connector)
    worker, scheduler = Connector(), Connector()
    scheduler.scheduler_side = object()
    worker.outer()
    scheduler.inner()
    scheduler.outer()
    assert (clock.worker_s, clock.scheduler_s) == (1, 2)


def test_the_model_has_the_bytes_that_the_figures_are_for() -> None:
    assert TOKEN_BYTES == 12 << 10
    assert DENSE_86M.block_size == 128


@pytest.mark.vllm
def test_an_engine_answers_what_the_rows_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    with run_engine(tmp_path, SLIDING.name, kvoffload(memory="512MiB", **PATIENCE), max_num_seqs=4) as engine:
        assert engine.ask("server_start", 1 << 20)["server"] > 0
        engine.ask("record_published")
        assert engine.ask("generate", 1, 300, 1)["cached"] == 0
        assert engine.ask("generate", 1, 300, 1)["cached"] == 256
        assert any(_is_restored(engine) for _ in range(30)), "the first saves may come before slots are to be had"
        count = engine.ask("count_published")
        assert 0 < count["usable"] <= count["kept"]
        batch = engine.ask("serve_batch", 100, 2, 200, 2)
        assert batch["kept"] > 0
        assert 0 < batch["ours"] < batch["engine"]
        steps = engine.ask("measure_steps", 200, 3)
        assert sum(blocks for blocks, _, _, _ in steps) > 0
        assert all(seconds > 0 for _, _, seconds, _ in steps)
        assert any(is_decode for _, _, _, is_decode in steps)


def _is_restored(engine: Child) -> bool:
    engine.ask("reset")
    return engine.ask("generate", 1, 300, 1)["cached"] == 256

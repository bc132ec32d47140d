"""A pool of a quarter of the engine's own cache, with default settings: what it is good for all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer, count
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.equality import answer, restorable
from tests.vllm.restarted import start
from tests.vllm.tiny_models import DENSE

pytestmark = pytest.mark.vllm

LENGTH = 1400
MANY = 60
"""Prompts that are more than the pool holds, and less than the engine does."""


def test_it_serves_a_reset_a_second_engine_and_a_restart(engines: EnginePool, tmp_path: Path) -> None:
    engines.leave_process()
    prompts, expected = [make_prompt(seed, LENGTH) for seed in range(40, 44)], restorable(DENSE, LENGTH)
    with SharedServer(tmp_path, memory="64MiB") as server:
        server.start()
        one = start(engines, server, DENSE, has_own_processes=True, **probe.INSPECTED)
        try:
            assert [answer(one, prompt).cached for prompt in prompts] == [0] * len(prompts)
            local = [answer(one, prompt) for prompt in prompts]
            assert [found.cached for found in local] == [expected] * len(prompts)
            one.reset_local()
            assert [answer(one, prompt) for prompt in prompts] == local
            other = start(engines, server, DENSE)
            try:
                assert [answer(other, prompt) for prompt in prompts] == local
            finally:
                other.close()
        finally:
            one.close()
        again = start(engines, server, DENSE)
        try:
            assert [answer(again, prompt) for prompt in prompts] == local
            assert probe.faults(again) == {}
        finally:
            again.close()


def test_an_engine_that_is_told_to_stop_leaves_there_what_it_had_computed_last(
    engines: EnginePool, tmp_path: Path
) -> None:
    """The pool was full by then, so it was to be saved when the engine would have lost it."""
    engines.leave_process()
    prompts = [make_prompt(seed, LENGTH) for seed in range(100, 100 + MANY)]
    with SharedServer(tmp_path, memory="64MiB") as server:
        server.start()
        one = start(engines, server, DENSE, has_own_processes=True, **probe.INSPECTED)
        try:
            for prompt in prompts:
                one.generate(prompt, max_tokens=1)
            one.drain()
            assert 0 < len(probe.entries(one)) < MANY * (LENGTH // DENSE.block_size), "the pool holds them all"
        finally:
            one.close()
        _await_end_of_sessions(server)
        other = start(engines, server, DENSE)
        try:
            restored = answer(other, prompts[-1])
            # None of it was there before. The full pool may evict some of it again for blocks that are saved later.
            assert restored.cached >= restorable(DENSE, LENGTH) // 2
            assert answer(other, prompts[-1]).tokens == restored.tokens
        finally:
            other.close()


def _await_end_of_sessions(server: SharedServer) -> None:
    """Waits until the server has the slots back that an ended engine held. The next engine would evict blocks for its
    own, and in this full pool these may be any."""
    for _ in range(1200):
        if not count(server).reserved:
            return
        time.sleep(0.05)
    raise AssertionError(f"the ended engine still holds slots: {count(server)}")

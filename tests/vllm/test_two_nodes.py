"""An engine whose ranks are on two machines, each with a server of its own, restores what it saved, bit-equal to its
own hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import answer, restorable, restored_answer
from tests.vllm.tiny_models import DENSE, TinyModel
from tests.vllm.two_nodes import count, node_servers, two_nodes

pytestmark = pytest.mark.vllm

TWO_RANKS = {"tensor_parallel_size": 2, "max_num_batched_tokens": 700}
LENGTHS = (257, 640, 1281)


def check_every_repeat(engine: Engine, model: TinyModel) -> None:
    """The very first request is one of a single step."""
    first = make_prompt(899, 641)
    answer(engine, first, max_tokens=1)
    engine.reset_local()
    assert answer(engine, first, max_tokens=1).cached == restorable(model, 641)
    for seed, length in enumerate(LENGTHS, start=900):
        prompt, expected = make_prompt(seed, length), restorable(model, length)
        assert answer(engine, prompt).cached == 0
        local = answer(engine, prompt)
        assert local.cached == expected
        restored = restored_answer(engine, prompt)
        assert (restored.cached, restored) == (expected, local)
    engine.drain()
    assert probe.faults(engine) == {}


def test_ranks_on_two_machines_restore_what_they_saved(engines: EnginePool, tmp_path: Path) -> None:
    with node_servers(tmp_path) as servers, two_nodes(engines, DENSE, servers, **TWO_RANKS) as engine:
        check_every_repeat(engine, DENSE)
        here, there = (count(server) for server in servers)
        assert here.readable == there.readable > 0
        assert (here.leases, there.leases) == (0, 0)

"""An engine whose ranks are on two machines, each with a server of its own, restores what it saved, bit-equal to its
own hit; whatever happens to one of the servers costs hits at most.

vLLM's CPU build starts one rank on each of several machines, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvoffload.cache import CacheStats
from tests.kit.machines import two_machines, why_not
from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer, count
from tests.vllm.engine import Engine, EnginePool, Json, make_prompt, make_room
from tests.vllm.equality import answer, check_every_repeat, restorable, restored_answer
from tests.vllm.tiny_models import DENSE, SLIDING, TinyModel
from tests.vllm.two_nodes import node_servers, two_nodes

pytestmark = pytest.mark.vllm

TWO_RANKS = {"tensor_parallel_size": 2, "max_num_batched_tokens": 700}
TWO_STAGES = {"pipeline_parallel_size": 2, "max_num_batched_tokens": 700}
LENGTHS = (257, 640, 1281)
NO_MACHINES = why_not()
QUIET_WAIT_S = 60.0
"""How long a server may take to hear what it was told."""
MAX_TRIES = 200
"""Requests until an engine is served again."""
Servers = tuple[SharedServer, SharedServer]


class Nodes(NamedTuple):
    engine: Engine
    servers: Servers


@pytest.fixture(scope="module")
def nodes(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """An engine on two nodes with a model of one group. A request to a server that hangs is a miss after two
    seconds."""
    with (
        node_servers(tmp_path_factory.mktemp("nodes")) as servers,
        two_nodes(engines, DENSE, servers, settings={"acquire_deadline": "2s"}, **TWO_RANKS) as engine,
    ):
        yield Nodes(engine, servers)


def list_held(_worker: Any) -> Json:
    """Questions of the scheduler side that a node holds something for."""
    proxy = probe.worker_side().proxy
    return [] if proxy is None else proxy.list_held()


def check_at_rest(engine: Engine, servers: Servers) -> None:
    """No fault was hidden, nothing is leased, and every node has the same blocks."""
    engine.drain()
    assert probe.faults(engine) == {}
    assert not any(engine.ask_workers(list_held))
    end_s = time.monotonic() + QUIET_WAIT_S
    while not is_at_rest(counts := [count(server) for server in servers]):
        assert time.monotonic() < end_s, counts
        time.sleep(0.02)


def is_at_rest(counts: Sequence[CacheStats]) -> bool:
    here, there = (one.readable for one in counts)
    return here == there > 0 and not any(one.leases for one in counts)


def test_ranks_on_two_machines_restore_what_they_saved(nodes: Nodes) -> None:
    check_every_repeat(nodes.engine, DENSE, LENGTHS)
    check_at_rest(*nodes)


# ---- what happens to a server ----


class Fault(NamedTuple):
    name: str
    node: int
    strike: Callable[[SharedServer], None]
    recover: Callable[[SharedServer], None]


def each(*faults: Fault) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fault", faults, ids=lambda fault: f"{fault.name}-{fault.node}")


def check_fault(nodes: Nodes, fault: Fault, seed: int) -> None:
    """No request fails or waits for long, and what is computed later is found again."""
    engine, server = nodes.engine, nodes.servers[fault.node]
    prompt, expected = make_prompt(seed, 641), restorable(DENSE, 641)
    answers = [answer(engine, prompt), answer(engine, prompt)]
    engine.reset_local()
    fault.strike(server)
    try:
        for _ in range(3):
            found = restored_answer(engine, prompt)
            assert found in answers
            assert found.cached in (0, expected)
        other = make_prompt(seed + 1000, 641)
        assert answer(engine, other).cached == 0
        engine.reset_local()
        assert answer(engine, other).cached == 0
    finally:
        fault.recover(server)
    for attempt in range(MAX_TRIES):
        again = make_prompt(seed + 2000 + attempt, 641)
        answers = [answer(engine, again), answer(engine, again)]
        found = restored_answer(engine, again)
        assert found in answers
        if found.cached:
            break
    assert (found.cached, found) == (expected, answers[1])
    engine.drain()
    assert probe.faults(engine) == {}
    assert not any(engine.ask_workers(list_held))


@each(Fault("killed", 1, SharedServer.kill, SharedServer.start))
def test_the_other_nodes_server_ends_and_comes_back(nodes: Nodes, fault: Fault) -> None:
    check_fault(nodes, fault, 1000)


@pytest.mark.campaign
@each(
    Fault("killed", 0, SharedServer.kill, SharedServer.start),
    Fault("stopped", 0, SharedServer.stop, SharedServer.go_on),
    Fault("stopped", 1, SharedServer.stop, SharedServer.go_on),
)
def test_an_engine_survives_the_end_or_hang_of_either_nodes_server(nodes: Nodes, fault: Fault) -> None:
    check_fault(nodes, fault, 5000 + 10 * fault.node + len(fault.name))


# ---- other shapes ----


@pytest.mark.campaign
def test_each_machine_starts_a_private_server(engines: EnginePool, tmp_path: Path) -> None:
    rooms = [tmp_path / "a", tmp_path / "b"]
    for room in rooms:
        room.mkdir()
    with two_nodes(engines, DENSE, rooms, **TWO_RANKS) as engine:
        check_every_repeat(engine, DENSE, LENGTHS)
        engine.drain()
        assert probe.faults(engine) == {}
        assert not any(engine.ask_workers(list_held))


@pytest.mark.campaign
def test_the_smaller_pool_decides(engines: EnginePool, tmp_path: Path) -> None:
    """The second machine's has room for a tenth of what the first one's has."""
    with (
        node_servers(tmp_path, "512MiB", "64MiB") as servers,
        two_nodes(engines, SLIDING, servers, settings={"save_policy": "eager"}, **TWO_RANKS) as engine,
    ):
        check_every_repeat(engine, SLIDING, LENGTHS)
        prompts = [make_prompt(7000 + number, 3800) for number in range(48)]
        for prompt in prompts:
            answer(engine, prompt)
        engine.reset_local()
        found = [answer(engine, prompt).cached for prompt in reversed(prompts)]
        assert any(found)
        assert not all(found)
        # Blocks that one node had lost were saved again on both.
        engine.reset_local()
        last = prompts[-1]
        answers = [answer(engine, last), answer(engine, last)]
        found_again = restored_answer(engine, last)
        assert (found_again.cached, found_again) == (restorable(SLIDING, 3800), answers[1])
        engine.drain()
        assert probe.faults(engine) == {}
        assert not any(engine.ask_workers(list_held))


@pytest.mark.campaign
@pytest.mark.parametrize("model", [DENSE, SLIDING], ids=lambda model: model.name)
def test_stages_on_two_machines_restore_what_they_saved(engines: EnginePool, tmp_path: Path, model: TinyModel) -> None:
    with node_servers(tmp_path) as servers, two_nodes(engines, model, servers, **TWO_STAGES) as engine:
        assert all(engine.ask_workers(make_room))
        check_every_repeat(engine, model, LENGTHS)
        check_at_rest(engine, servers)


@pytest.mark.campaign
@pytest.mark.skipif(bool(NO_MACHINES), reason=NO_MACHINES)
@pytest.mark.parametrize("shape", [TWO_RANKS, TWO_STAGES], ids=["ranks", "stages"])
def test_machines_that_have_nothing_but_a_wire_in_common(
    engines: EnginePool, tmp_path: Path, shape: dict[str, object]
) -> None:
    with (
        two_machines() as network,
        node_servers(tmp_path) as servers,
        two_nodes(engines, DENSE, servers, network=network, **shape) as engine,
    ):
        if shape is TWO_STAGES:
            assert all(engine.ask_workers(make_room))
        check_every_repeat(engine, DENSE, LENGTHS)
        check_at_rest(engine, servers)

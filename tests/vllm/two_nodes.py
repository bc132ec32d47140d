"""Starts engines with ranks on two machines, each machine with a cache server of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from tests.kit.free_ports import free_port
from tests.kit.machines import Machine, Network, inside
from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
from tests.vllm.engine import SETTINGS, Engine, EnginePool, start_engine
from tests.vllm.tiny_models import TinyModel

ROOT = Path(__file__).parents[2]
_HERE = Machine("here", "127.0.0.1", "lo")


@contextmanager
def node_servers(folder: Path, *memories: str) -> Iterator[tuple[SharedServer, SharedServer]]:
    """A server for each node, which know nothing of each other."""
    with ExitStack() as stack:
        servers = []
        for node, memory in enumerate(memories or ("256MiB", "256MiB")):
            room = folder / f"node{node}"
            room.mkdir()
            servers.append(stack.enter_context(SharedServer(room, memory=memory)))
            servers[-1].start()
        yield servers[0], servers[1]


@contextmanager
def two_nodes(
    engines: EnginePool,
    model: TinyModel,
    servers: Sequence[SharedServer | Path],
    *,
    network: Network | None = None,
    settings: dict[str, object] | None = None,
    **arguments: object,
) -> Iterator[Engine]:
    """Starts an engine whose ranks all run on this machine, or each half on a machine of the network. A folder in
    `servers` stands for a private server, which keeps its files there."""
    machines = (_HERE, _HERE) if network is None else (network.one, network.other)
    folder = engines.model_folder(model)
    together = {
        **SETTINGS,
        **model.engine_args,
        "nnodes": 2,
        "master_addr": machines[0].address,
        "master_port": free_port(),
        "distributed_executor_backend": "mp",
        **arguments,
    }
    transfers = [probe.transfer(**find_settings(server), **(settings or {})) for server in servers]
    with pytest.MonkeyPatch.context() as patch:
        be_on(patch, machines[1], servers[1])
        second = subprocess.Popen(
            [
                *(machines[1].enter if network is not None else ()),
                sys.executable,
                "-m",
                "tests.vllm.second_node",
                json.dumps({**together, "model": str(folder), "node_rank": 1, "kv_transfer_config": transfers[1]}),
            ],
            cwd=ROOT,
            env=os.environ,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            be_on(patch, machines[0], servers[0])
            mine = {**together, "node_rank": 0, "kv_transfer_config": transfers[0]}
            with nullcontext() if network is None else inside(network.one):
                engine = start_engine(model, folder, has_own_processes=True, **mine)
            try:
                yield engine
            finally:
                engine.close()
        finally:
            os.killpg(second.pid, signal.SIGKILL)
            second.communicate()


def find_settings(server: SharedServer | Path) -> dict[str, object]:
    return {"memory": "128MiB"} if isinstance(server, Path) else {"server": str(server.socket)}


def be_on(patch: pytest.MonkeyPatch, machine: Machine, server: SharedServer | Path) -> None:
    """For an engine's processes: the address and the device that the others reach them by, and where a private server
    is."""
    if isinstance(server, Path):
        patch.setenv("TMPDIR", str(server))
    patch.setenv("VLLM_HOST_IP", machine.address)
    patch.setenv("GLOO_SOCKET_IFNAME", machine.device)

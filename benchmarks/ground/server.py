"""Runs a real `kvoffload serve` for a virtual engine, and counts what its client still owes or is owed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvoffload.errors import BenchmarkError
from kvoffload.units import GIB

SEGMENT_BYTES = 4 * GIB
ENVIRONMENT = {"KVOFFLOAD_TESTS": "1"}
"""A sparse pool is for tests alone."""
END_S = 30.0
MAX_LOOKS = 2000
LOOK_S = 0.0005


@contextmanager
def run_server(folder: Path, *, memory: str, segment_bytes: int = SEGMENT_BYTES) -> Iterator[Path]:
    """Runs a server and yields its socket. Only the index has pages of memory, because no record is touched."""
    socket = folder / "s"
    command = [sys.executable, "-P", "-m", "kvoffload", "serve", "--adopt-wait", "0"]
    settings = {"server": socket, "memory": memory, "segment_size": segment_bytes, "sparse_memory": "true"}
    for name, value in settings.items():
        command += ["--set", f"{name}={value}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **ENVIRONMENT})
    assert process.stdout is not None
    try:
        if not process.stdout.readline().startswith("kvoffload serves"):
            raise BenchmarkError("the cache server did not start", remedy="see what it wrote before this line")
        yield socket
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def list_clients(engine: Any) -> list[Any]:
    """Of those who take slots and leases: the scheduler side's, and that of each other node."""
    parts = engine.scheduler.connector.scheduler_side.parts
    own = parts.cache if parts.nodes is None else parts.nodes.own
    proxies = [rank.connector.worker_side.proxy for rank in engine.ranks]
    return [own, *(proxy.cache for proxy in proxies if proxy is not None)]


def await_answers(clients: Sequence[Any], at_most_s: float) -> None:
    """In reality, while an engine computes: what was asked of the server is answered meanwhile, as it would be."""
    until_s = time.monotonic() + at_most_s
    for client in clients:
        while client.link.lanes.awaits_answers and (left_s := until_s - time.monotonic()) > 0:
            client.wire.await_answers(min(left_s, LOOK_S), with_control=False)
            with client.lock:
                client.connection.look(time.monotonic_ns())


def ask_counts(client: Any) -> Any:
    """The server's, when it has had everything that this client told it."""
    client.budget_ns = -1  # no step waits for this
    return client.stats()


def settle(client: Any) -> tuple[Any, int]:
    """Waits until the server has had everything and no request is open. Returns its counts and the slots held ready."""
    for _ in range(MAX_LOOKS):
        before = _count_stock(client)
        stats = ask_counts(client)
        if before is not None and before == _count_stock(client):
            return stats, before
    raise BenchmarkError("the client asks for slots without end")


def count_left(engine: Any) -> dict[str, int]:
    """Counts what is not given back though no request runs: in the engine, in its connector, at the server."""
    scheduler = engine.scheduler
    blocks = scheduler.kv_cache_manager.block_pool
    left = {
        "requests": len(scheduler.requests),
        "blocks": blocks.num_gpu_blocks - 1 - blocks.get_num_free_blocks(),
    }
    side = getattr(scheduler.connector, "scheduler_side", None)
    if side is not None and side.parts is not None:
        parts = side.parts
        clients = list_clients(engine)
        stats, stock = settle(clients[0])
        stock += sum(settle(client)[1] for client in clients[1:])
        if parts.nodes is not None:
            groups = range(len(parts.groups))
            stock += sum(node.count_ready(group) for node in parts.nodes.others for group in groups)
        left |= {
            "known_requests": len(side.requests),
            "questions": len(parts.restores.questions),
            "loads": parts.restores.pending,
            "saves": parts.saves.pending,
            "pins": parts.pins.count,
            "leases": stats.leases,
            "slots": stats.reserved - stock,
            "quarantined": stats.quarantined,
            "faults": sum(scheduler.connector.faults.values()),
            "worker_faults": sum(sum(rank.connector.faults.values()) for rank in engine.ranks),
        }
    return left


def _count_stock(client: Any) -> int | None:
    with client.lock:
        stocks = client.blocks.stocks
        return None if any(stock.is_asking for stock in stocks) else sum(map(len, stocks))

"""What does the first token of a prompt cost that the engine has dropped and its connector still has?"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from benchmarks.connectors.engine_child import kvoffload, run_engine
from benchmarks.connectors.model import DENSE_86M
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.child import Child
from kvoffload.bench.measure import Pair, summarize_pairs
from kvoffload.errors import BenchmarkError

OURS, WHOLE = "kvoffload", "kvoffload, whole prompts"
PROMPTS = (4096, 4160)
"""A whole number of blocks, of which the engine's own hit leaves the last to be computed, and half a block more."""
ROUNDS = 10
COLD_ROUNDS = 3
RAM_DISK = Path("/dev/shm")
LMCACHE_START_S = 60.0
ENGINE = {
    "kv_cache_memory_bytes": 1 << 30,
    "max_model_len": max(PROMPTS) + 128,
    # The example connector does not save prompts that are computed in parts.
    "max_num_batched_tokens": max(PROMPTS) + 128,
}


@dataclass(frozen=True, kw_only=True)
class FirstTokens:
    """One engine's. `own` and `restored` in turn."""

    pair: Pair
    fastest_s: float
    """The fastest of `restored`, the time on an otherwise idle machine: it compares engines that run minutes apart."""
    cold_s: float
    own_tokens: int
    restored_tokens: int


def measure_ttft(folder: Path, progress: Progress) -> Iterator[Result]:
    """Makes a row for each connector and prompt, and one that compares ours with the best of the others."""
    found: dict[tuple[str, int], FirstTokens] = {}
    for name, opened in ((OURS, _ours), (WHOLE, _ours_whole), ("ExampleConnector", _example), ("LMCache", _lmcache)):
        if name == "LMCache" and find_spec("lmcache") is None:
            progress("LMCache is not installed and not measured")
            continue
        progress(f"first token, {name}")
        with opened() as connector, run_engine(folder, DENSE_86M.name, connector, **ENGINE) as engine:
            for tokens in PROMPTS:
                found[name, tokens] = _measure(engine, tokens)
                yield _result(found[name, tokens], name, tokens)
    for ours, tokens in product((OURS, WHOLE), PROMPTS):
        others = {name: one for (name, prompt), one in found.items() if prompt == tokens and name not in {OURS, WHOLE}}
        best = min(others, key=lambda name: others[name].fastest_s)
        yield Result(
            name="ttft, the fastest of each",
            value=found[ours, tokens].fastest_s * 1e3,
            limit=others[best].fastest_s * 1e3,
            unit="ms",
            spread=0.0,
            goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.0),
            params={"connector": ours, "prompt": tokens, "limit_is": best},
        )


def _result(found: FirstTokens, name: str, tokens: int) -> Result:
    return Result(
        name="ttft",
        value=found.pair.value_s * 1e3,
        limit=found.pair.limit_s * 1e3,
        unit="ms",
        spread=found.pair.spread,
        goal=Goal(Measure.RATIO, Bound.AT_MOST, 1.05) if name == OURS else None,
        params={
            "connector": name,
            "prompt": tokens,
            "restored": found.restored_tokens,
            "own_hit": found.own_tokens,
            "fastest_ms": round(found.fastest_s * 1e3, 1),
            "cold_ms": round(found.cold_s * 1e3),
        },
    )


def _measure(engine: Child, tokens: int) -> FirstTokens:
    own, restored, cold = [], [], []
    own_tokens = restored_tokens = tokens
    for number in range(1 + COLD_ROUNDS):  # the first one warms up
        seed = tokens + number
        engine.ask("reset")
        cold.append(engine.ask("generate", seed, tokens, 1)["seconds"])
    for number in range(1 + ROUNDS):
        hit = engine.ask("generate", seed, tokens, 1)
        engine.ask("reset")
        back = engine.ask("generate", seed, tokens, 1)
        if number:
            own.append(hit["seconds"])
            restored.append(back["seconds"])
            own_tokens = min(own_tokens, hit["cached"])
            restored_tokens = min(restored_tokens, back["cached"])
    return FirstTokens(
        pair=summarize_pairs(restored, own),
        fastest_s=min(restored),
        cold_s=statistics.median(cold[1:]),
        own_tokens=own_tokens,
        restored_tokens=restored_tokens,
    )


@contextmanager
def _ours() -> Iterator[dict[str, object]]:
    yield kvoffload(memory="2GiB")


@contextmanager
def _ours_whole() -> Iterator[dict[str, object]]:
    yield kvoffload(memory="2GiB", whole_prompts=True)


@contextmanager
def _example() -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory(dir=RAM_DISK) as folder:
        yield {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        }


@contextmanager
def _lmcache() -> Iterator[dict[str, object]]:
    """Its server, and the way of copying that is its fastest on a CPU."""
    port, http_port, metrics_port = _free_ports(3)
    command = [sys.executable, "-c", "from lmcache.cli.main import main; main()", "server", "--l1-size-gb", "2"]
    command += ["--no-l1-use-lazy", "--eviction-policy", "LRU", "--supported-transfer-mode", "auto"]
    command += ["--port", port, "--http-port", http_port, "--prometheus-port", metrics_port]
    with ExitStack() as stack:
        server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        stack.callback(server.wait)
        stack.callback(server.kill)
        _await_port(int(port), server)
        yield {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": int(port),
                "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            },
        }


def _free_ports(count: int) -> list[str]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [str(one.getsockname()[1]) for one in sockets]


def _await_port(port: int, server: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + LMCACHE_START_S
    while time.monotonic() < until_s and server.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise BenchmarkError("LMCache's server did not start", remedy="see what it wrote before this line")

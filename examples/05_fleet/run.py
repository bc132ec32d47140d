"""Three servers, one fleet: what an engine on one machine has computed, an engine on another one finds.

The machines are three servers on loopback, which know each other by their keys. The first engine's blocks are spread
over all of them; the second engine, on another machine, restores them. Then a machine is lost: a third engine
has what is left of the prompt, computes the rest, and says the same. Exit code 0: tokens and logprobs are equal.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from mini_engine.engine import Engine, Request
from mini_engine.kv_cache import CacheConfig
from mini_engine.model import LAYER_SETS, ModelConfig
from mini_engine.shared_store import SharedStore

from kvoffload.key_files import read_public_key, write_new_pair

CACHE, MODEL = CacheConfig(blocks=64), ModelConfig(layers=LAYER_SETS["hybrid"])
PROMPT = [(17 * i + 5) % ModelConfig.vocabulary for i in range(10 * CACHE.block_tokens + 4)]
NAMES = ("one", "two", "three")
WAIT_S = 60.0


class Machine:
    """A server of the fleet. Its process is killed at the end at the latest."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.socket = folder / name
        self.address = f"tcp://127.0.0.1:{free_port()}"
        self.key = read_public_key(write_new_pair(folder / f"key-{name}")[1])
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    def start(self, config: Path) -> None:
        command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", "serve", "--adopt-wait", "0"]
        command += ["--config", str(config), "--set", f"server={self.socket}", "--set", f"listen={self.address}"]
        command += ["--set", f"key_file={self._folder / f'key-{self.name}.key'}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        print(f"{self.name:>5}: {self._process.stdout.readline()}", end="", flush=True)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def run_fleet() -> Iterator[list[Machine]]:
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder = Path(place)
        machines = [Machine(folder, name) for name in NAMES]
        config = folder / "fleet.toml"
        lines = ['memory = "64MiB"', 'segment_size = "64MiB"', 'peer_listen = "tcp://127.0.0.1:0"']
        for machine in machines:
            lines += ["[[peers]]", f'address = "{machine.address}"', f'key = "{machine.key}"']
        config.write_text("\n".join(lines))
        for machine in machines:
            stack.callback(machine.kill)
            machine.start(config)
        yield machines


def run(machine: Machine, *, peers: int) -> Request:
    """An engine of its own for one request, when so many other machines are there."""
    store = SharedStore(machine.socket, MODEL, CACHE)
    engine = Engine(MODEL, CACHE, torch.device("cpu"), store)
    assert store.client.wait_until_served(30), store.client.fault
    end_s = time.monotonic() + WAIT_S
    while sum(place.state == "ready" for place in store.client.stats().places) != peers:
        assert time.monotonic() < end_s, store.client.stats().places
        time.sleep(0.05)
    request = engine.run(PROMPT, max_tokens=4)
    while store.client.stats().traffic["peer"]["waiting_bytes"]:
        time.sleep(0.05)
    stats = store.client.stats()
    moved = stats.traffic["peer"]
    print(
        f"{machine.name:>5}: reused {request.reused:3} of {len(PROMPT)} tokens; "
        f"{moved['promoted']:2} blocks came from peers, {moved['written']:2} went to them"
    )
    engine.sleep()
    return request


def main() -> int:
    with run_fleet() as (one, two, three):
        first = run(one, peers=2)
        second = run(two, peers=2)
        one.kill()
        print("  one: lost")
        third = run(three, peers=1)
    is_equal = all(
        first.generated == other.generated and torch.equal(torch.stack(first.logprobs), torch.stack(other.logprobs))
        for other in (second, third)
    )
    print(f"tokens and logprobs equal, every bit: {'yes' if is_equal else 'NO'}")
    return 0 if is_equal and second.reused and not first.reused else 1


if __name__ == "__main__":
    sys.exit(main())

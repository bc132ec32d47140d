"""Two engines on two machines: what one has computed, the first request of the other finds through a remote, bit-equal
to the engine's own hit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from kvoffload.cache import CacheStats
from tests.kit.fleet_of_two import fleet_of_two
from tests.kit.machines import Machine, Network, two_machines, why_not
from tests.kit.tiers.mooncake_server import add_libraries, serve_mooncake
from tests.kit.tiers.valkey_server import environment, find_program
from tests.vllm import connector_probe as probe
from tests.vllm.apart import Waiting, engine_of
from tests.vllm.cache_server import SharedServer
from tests.vllm.disk_servers import stats_of
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import answer, restorable
from tests.vllm.restarted import start
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel

MISSING = why_not()
pytestmark = [pytest.mark.vllm, pytest.mark.skipif(bool(MISSING), reason=MISSING)]

WAIT_S = 60.0
LENGTH = 1400
SEEDS = range(41, 47)
"""A prompt each: of one that has few blocks, all might live on the one machine or on the other."""
VALKEY_PORT, S3_PORT, MOONCAKE_PORT = 6379, 9000, 50051
Servers = tuple[SharedServer, SharedServer]
SETTINGS = {"promote_deadline": "30s", "remote_timeout": "10s"}


@contextmanager
def beside(folder: Path, network: Network, **settings: str) -> Iterator[Servers]:
    """Servers that know nothing of each other, on either machine. `{address}` in a setting is the machine's own."""

    def make(machine: Machine) -> SharedServer:
        room = folder / f"room-{machine.name}"
        room.mkdir()
        own = {name: value.format(address=machine.address) for name, value in settings.items()}
        return SharedServer(room, enter=machine.enter, **SETTINGS, **own)

    with make(network.one) as one, make(network.other) as other:
        one.start()
        other.start()
        yield one, other


@contextmanager
def over_valkey(folder: Path, network: Network) -> Iterator[Servers]:
    address = network.one.address
    command = [*network.one.enter, find_program("redis-server"), "--bind", address, "--port", str(VALKEY_PORT)]
    command += ["--protected-mode", "no", "--save", "", "--dir", str(folder)]
    with (
        run_beside(command, environment()),
        beside(folder, network, valkey=f"valkey://{address}:{VALKEY_PORT}") as servers,
    ):
        yield servers


@contextmanager
def run_beside(command: list[str], variables: Mapping[str, str]) -> Iterator[None]:
    """Runs a command during the block. The code that needs it waits until it is there."""
    process = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.communicate()


_BUCKET = """
import logging, sys
from http.client import HTTPConnection
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
address, port = sys.argv[1], int(sys.argv[2])
ThreadedMotoServer(ip_address=address, port=port, verbose=False).start()
asking = HTTPConnection(address, port)
asking.request("PUT", "/bucket")
assert asking.getresponse().status == 200
sys.stdin.read()
"""


@contextmanager
def over_s3(folder: Path, network: Network) -> Iterator[Servers]:
    if find_spec("moto") is None:  # not imported here: it makes objects that must not be looked at
        pytest.skip("moto[server] is not installed")
    address = network.one.address
    keys = folder / "credentials"
    keys.write_text("[default]\naws_access_key_id = cache\naws_secret_access_key = of-a-test\n")
    keys.chmod(0o600)
    bucket = {"s3": "s3://bucket/blocks", "s3_endpoint": f"http://{address}:{S3_PORT}", "s3_region": "us-east-1"}
    command = [*network.one.enter, sys.executable, "-c", _BUCKET, address, str(S3_PORT)]
    with run_beside(command, os.environ), beside(folder, network, s3_credentials_file=str(keys), **bucket) as servers:
        yield servers


@contextmanager
def over_mooncake(folder: Path, network: Network) -> Iterator[Servers]:
    """The store's memory is on one machine."""
    place = {"host": network.one.address, "port": MOONCAKE_PORT, "enter": network.one.enter}
    with pytest.MonkeyPatch.context() as patch:
        add_libraries(patch)
        with (
            serve_mooncake(folder, **place) as master,
            beside(folder, network, mooncake=str(master.address), mooncake_host="{address}") as servers,
        ):
            yield servers


@contextmanager
def over_peers(folder: Path, network: Network) -> Iterator[Servers]:
    with fleet_of_two(folder, network, **SETTINGS) as servers:
        yield servers


Kind = Callable[[Path, Network], AbstractContextManager[Servers]]
KINDS: dict[str, Kind] = {"valkey": over_valkey, "s3": over_s3, "mooncake": over_mooncake, "peer": over_peers}


def await_settled(engine: Engine, kind: str) -> CacheStats:
    """Until the remote is there, and nothing waits to be written to it any more."""
    end_s = time.monotonic() + WAIT_S
    while True:
        stats = stats_of(engine)
        counts = stats.traffic[kind]
        # Records that have just become readable are not queued yet; some of a fleet's records have their home here.
        is_all = kind == "peer" or counts["written"] >= stats.readable
        is_ready = {place.state for place in stats.places} == {"ready"}
        if is_ready and is_all and not counts["waiting_bytes"] and stats.readable:
            return stats
        assert time.monotonic() < end_s, stats
        time.sleep(0.02)


def await_ready(engine: Engine) -> None:
    end_s = time.monotonic() + WAIT_S
    while {place.state for place in stats_of(engine).places} != {"ready"}:
        assert time.monotonic() < end_s
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("valkey", DENSE),
        ("s3", SLIDING),
        ("mooncake", GDN),
        ("peer", GDN),
        pytest.param("peer", DENSE, marks=pytest.mark.campaign),
        pytest.param("peer", SLIDING, marks=pytest.mark.campaign),
    ],
    ids=lambda one: one if isinstance(one, str) else one.name,
)
def test_the_first_request_on_another_machine_hits(
    engines: EnginePool, tmp_path: Path, kind: str, model: TinyModel
) -> None:
    engines.leave_process()
    prompts, expected = [make_prompt(seed=seed, length=LENGTH) for seed in SEEDS], restorable(model, LENGTH)
    with two_machines() as network, KINDS[kind](tmp_path, network) as (here, there):
        engine = start(engines, here, model)
        try:
            await_ready(engine)
            local = []
            for prompt in prompts:
                assert answer(engine, prompt).cached == 0
                local.append(answer(engine, prompt))
                assert local[-1].cached == expected
            engine.drain()
            assert await_settled(engine, kind).traffic[kind]["written"] > 0
        finally:
            engine.close()
        engine = start(engines, there, model, promote_deadline="30s")
        try:
            await_ready(engine)
            for prompt, hit in zip(prompts, local, strict=True):
                restored = answer(engine, prompt)
                assert restored.cached == expected
                assert restored == hit
            engine.drain()
            counts = stats_of(engine).traffic[kind]
            assert counts["promoted"] > 0
            assert counts["quarantined"] == counts["late"] == counts["missing"] == 0
            assert probe.faults(engine) == {}
        finally:
            engine.close()


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["valkey", "peer"])
def test_a_decoder_on_another_machine_waits_for_what_is_computed_here(
    engines: EnginePool, tmp_path: Path, kind: str
) -> None:
    engines.leave_process()
    with (
        two_machines() as network,
        KINDS[kind](tmp_path, network) as (here, there),
        engine_of(engines, "kv_consumer", there, DENSE) as consumer,
        engine_of(engines, "kv_producer", here, DENSE, has_own_processes=True, **probe.INSPECTED) as producer,
    ):
        await_ready(consumer)
        for seed in SEEDS:
            prompt = make_prompt(seed=seed, length=LENGTH)
            waiting = Waiting(consumer, prompt, expect_tokens=LENGTH)
            waiting.stay()
            assert producer.generate(prompt, max_tokens=1).kv_transfer_params == {
                "expect_tokens": LENGTH // DENSE.block_size * DENSE.block_size
            }
            restored = waiting.wait()
            assert restored.cached == restorable(DENSE, LENGTH)
            assert restored == answer(consumer, prompt)
        assert stats_of(consumer).traffic[kind]["promoted"] > 0
        assert probe.faults(consumer) == {}

"""Examples with a server: 02_shared_server.py, 03_two_engines_one_server.py; and the mini engine's shared store."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mini_engine.engine import Engine
from mini_engine.kv_cache import CacheConfig
from mini_engine.model import LAYER_SETS, ModelConfig
from mini_engine.shared_store import SharedStore, identify
from serving import serve

from kvoffload.client import Client, ClientSettings, Member
from kvoffload.protocol import Role
from tests.examples.serve import EXAMPLES, QUANTS, assert_equal, make_prompt
from tests.kit.server.tiers import await_that

WITHOUT_WAITING = """
import runpy, sys
from kvoffload.client import Client
Client.wait_until_served = lambda self, timeout_s: False
sys.argv[0] = "06_working_engine.py"
sys.path.insert(0, ".")
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MODEL, CACHE = ModelConfig(layers=LAYER_SETS["hybrid"]), CacheConfig(blocks=32)
PROMPT = make_prompt(8 * CACHE.block_tokens + 3)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("02_shared_server.py", "found 320 tokens of 320, 20 records: every byte is right"),
        ("03_two_engines_one_server.py", "tokens and logprobs equal, every bit: yes"),
    ],
)
def test_the_example_runs(script: str, says: str) -> None:
    command = [sys.executable, str(EXAMPLES / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert says in done.stdout
    # On a busy machine the server has time to warn that an engine with other groups stores the other model's prompt.
    assert [line for line in done.stderr.splitlines() if "an engine that differs in groups" not in line] == []


def test_without_torch_the_example_says_what_to_install() -> None:
    script = "import runpy, sys; sys.modules['torch'] = None; runpy.run_path('03_two_engines_one_server.py')"
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {script}"]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "this example needs torch: pip install torch\n")


def test_the_working_engine_needs_no_torch() -> None:
    script = "import runpy, sys; runpy.run_path('06_working_engine.py'); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", f"import sys; sys.path.insert(0, '.'); {script}"], cwd=EXAMPLES, check=True)


def test_an_engine_works_and_is_counted() -> None:
    with serve(memory="64MiB") as socket:
        command = [sys.executable, str(EXAMPLES / "06_working_engine.py"), "--turns", "60", "--pause", "0"]
        places = os.environ | {"KVOFFLOAD_SERVER": str(socket)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=places)
        assert (done.returncode, done.stderr) == (0, ""), done
        first, last = done.stdout.splitlines()
        assert first.startswith("25 turns: ")
        assert last.startswith("50 turns: ")
        member = Member(engine="test", role=Role.OBSERVER)
        with Client(ClientSettings(socket=socket, member=member)) as client:
            assert client.wait_until_served(60)
            assert client.insight().outcomes["hit_memory"] > 0
            assert client.insight().saved_s > 0, "computing that hits have saved is told, too"


def test_without_its_server_the_working_engine_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_WAITING, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=EXAMPLES)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: no server at {tmp_path / 's'}")


def start(socket: Path, *, is_served: bool = True, cache: CacheConfig = CACHE) -> tuple[Engine, SharedStore]:
    store = SharedStore(socket, MODEL, cache)
    engine = Engine(MODEL, cache, torch.device("cpu"), store)
    assert store.client.wait_until_served(60 if is_served else 0) == is_served
    return engine, store


def test_what_one_engine_saved_another_restores_and_the_lost_is_computed() -> None:
    with serve(memory="64MiB") as socket:
        first, one = start(socket)
        cold = first.run(PROMPT, max_tokens=3)
        one.client.stats()
        second, other = start(socket)
        restored = second.run(PROMPT, max_tokens=3)
        assert (cold.reused, restored.reused) == (0, 64)
        assert_equal(cold, restored)
        # Records of the states are gone: nothing can be continued.
        second.scrub()
        other.client.invalidate(0, b"".join(key.block_hash for key in second.list_keys(PROMPT)[0]))
        other.client.stats()
        computed = second.run(PROMPT, max_tokens=3)
        assert computed.restored_blocks == 0
        assert_equal(cold, computed)
        assert other.client.stats().leases == 0
        first.sleep()
        second.sleep()


def is_open(store: SharedStore) -> bool:
    """Whether the disk is open: before that nothing is found on it and nothing is written to it."""
    return [place.state for place in store.client.stats().places] == ["ready"]


@pytest.mark.parametrize("quant", QUANTS)
def test_a_restarted_engine_and_server_restore_from_disk(tmp_path: Path, quant: str) -> None:
    """Restored blocks include their scales, per token and head."""
    cache = CacheConfig(blocks=32, quant=quant)
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with serve(memory="64MiB", disk=str(disk), disk_size="1GiB") as socket:
        first, store = start(socket, cache=cache)
        await_that(lambda: is_open(store))
        cold = first.run(PROMPT, max_tokens=3)
        hit = first.run(PROMPT, max_tokens=3)
        assert (cold.reused, hit.reused, hit.restored_blocks) == (0, 64, 0)
        await_that(lambda: (stats := store.client.stats()).places[0].records >= stats.readable)
        first.sleep()
    with serve(memory="64MiB", disk=str(disk), disk_size="1GiB") as socket:
        second, store = start(socket, cache=cache)
        await_that(lambda: is_open(store))
        assert store.client.stats().readable == 0
        restored = second.run(PROMPT, max_tokens=3)
        assert restored.reused == 64
        assert restored.restored_blocks > 0
        assert_equal(hit, restored)
        assert_equal(cold, restored)
        second.sleep()


def test_a_hit_that_is_gone_when_it_is_leased_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(memory="64MiB") as socket:
        engine, store = start(socket)
        cold = engine.run(PROMPT, max_tokens=3)
        store.client.stats()
        engine.scrub()
        monkeypatch.setattr(store, "has", lambda _: True)
        longer = [*PROMPT, *PROMPT]
        assert engine.run(longer, max_tokens=1).restored_blocks == 0
        assert store.client.stats().leases == 0
        engine.scrub()
        assert_equal(cold, engine.run(PROMPT, max_tokens=3))
        engine.sleep()


def test_without_a_server_everything_is_computed(tmp_path: Path) -> None:
    engine, _ = start(tmp_path / "nobody", is_served=False)
    cold = engine.run(PROMPT, max_tokens=3)
    engine.scrub()
    again = engine.run(PROMPT, max_tokens=3)
    assert again.reused == 0
    assert_equal(cold, again)
    engine.sleep()


def test_another_model_is_another_identity() -> None:
    known = {
        identify(model, cache)
        for model in (MODEL, ModelConfig(layers=LAYER_SETS["full"]), ModelConfig(window=16))
        for cache in (CACHE, CacheConfig(blocks=99), CacheConfig(quant="int8_per_token_head"))
    }
    assert len(known) == 6

"""What is on disk comes to memory when it is asked for, and the next request restores it; the server counts prompts."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import Observer, observed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

HIT = 6 * PAGE
WAIT_S = 60.0


def test_what_is_on_disk_alone_is_a_miss_once_and_restored_from_then_on(tmp_path: Path) -> None:
    model, disk = build_model("mha", tmp_path / "model"), tmp_path / "disk"
    disk.mkdir(mode=0o700)
    with SharedServer(tmp_path, disk=str(disk), disk_size="1GiB") as server:
        server.start()
        with (
            SGLangEngine(model, tmp_path / "log", linker={"server": str(server.socket)}) as engine,
            observed(server) as observer,
        ):
            prompt = make_prompt(51)
            engine.generate(prompt)
            (own,) = engine.generate(prompt)
            observer.await_pages(6)
            await_written(observer)
            assert observer.client.clear() == 6
            engine.flush()
            (missed,) = engine.generate(prompt)
            assert (missed.own, missed.restored) == (0, 0)
            observer.await_pages(6)
            engine.flush()
            (restored,) = engine.generate(prompt)
            assert (restored.restored, restored.answer) == (HIT, own.answer)
            assert await_count(observer, "hit_memory") == HIT


def await_written(observer: Observer) -> None:
    """Until the disk has what memory has."""
    end_s = time.monotonic() + WAIT_S
    while (stats := observer.client.stats()).traffic["disk"]["written"] < stats.readable:
        assert time.monotonic() < end_s, stats
        time.sleep(0.02)


def await_count(observer: Observer, outcome: str) -> int:
    """Of tokens: the engine tells of a prompt some time after it."""
    end_s = time.monotonic() + WAIT_S
    while not (count := observer.client.insight().outcomes.get(outcome, 0)):
        assert time.monotonic() < end_s, observer.client.insight()
        time.sleep(0.02)
    return count

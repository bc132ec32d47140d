"""Pages on disk are promoted when they are asked for, and the next request restores them; the server counts prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sglang.engine import PAGE, SGLangEngine, build_model, make_prompt
from tests.sglang.shared_records import Observer, observed
from tests.vllm.cache_server import SharedServer

pytestmark = pytest.mark.sglang

HIT = 6 * PAGE


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
            observer.await_that(lambda: is_written(observer), "the disk has less than memory")
            assert observer.client.clear() == 6
            engine.flush()
            (missed,) = engine.generate(prompt)
            assert (missed.own, missed.restored) == (0, 0)
            observer.await_pages(6)
            engine.flush()
            (restored,) = engine.generate(prompt)
            assert (restored.restored, restored.answer) == (HIT, own.answer)
            observer.await_that(lambda: count_hits(observer) == HIT, "the server was not told of the hit")


def is_written(observer: Observer) -> bool:
    """The disk has what memory has."""
    stats = observer.client.stats()
    return int(stats.traffic["disk"]["written"]) >= stats.readable


def count_hits(observer: Observer) -> int:
    """Of tokens, as the engine tells some time after a prompt."""
    return int(observer.client.insight().outcomes.get("hit_memory", 0))

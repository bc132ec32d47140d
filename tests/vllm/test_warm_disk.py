"""Engine and server are started again over a disk that has what was saved: the first request hits, bit-equal to the
engine's own hit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.disk_servers import await_written, disk_server, stats_of
from tests.vllm.engine import EnginePool, make_prompt
from tests.vllm.equality import answer, restorable
from tests.vllm.restarted import start
from tests.vllm.tiny_models import DENSE, GDN, SLIDING, TinyModel

pytestmark = pytest.mark.vllm

LENGTH = 1400


@pytest.mark.parametrize(
    "model", [pytest.param(DENSE, marks=pytest.mark.campaign), SLIDING, GDN], ids=lambda model: model.name
)
def test_the_first_request_after_a_restart_is_read_from_disk(
    engines: EnginePool, tmp_path: Path, model: TinyModel
) -> None:
    engines.leave_process()
    (tmp_path / "disk").mkdir(mode=0o700)
    prompt, expected = make_prompt(seed=31, length=LENGTH), restorable(model, LENGTH)
    with disk_server(tmp_path) as server:
        engine = start(engines, server, model)
        try:
            assert answer(engine, prompt).cached == 0
            local = answer(engine, prompt)
            assert local.cached == expected
            engine.drain()
            assert await_written(engine) > 0
        finally:
            engine.close()
    # That was kill -9: what the next server has, it has from the disk.
    with disk_server(tmp_path) as server:
        engine = start(engines, server, model)
        try:
            assert probe.pool_stats(engine)["readable"] == 0
            restored = answer(engine, prompt)
            assert restored.cached == expected
            assert restored == local
            engine.drain()
            counts = stats_of(engine).traffic["disk"]
            assert counts["promoted"] > 0
            assert counts["quarantined"] == counts["late"] == counts["missing"] == 0
            assert probe.faults(engine) == {}
        finally:
            engine.close()


def test_a_record_that_was_damaged_on_disk_is_computed_again(engines: EnginePool, tmp_path: Path) -> None:
    engines.leave_process()
    (tmp_path / "disk").mkdir(mode=0o700)
    prompt = make_prompt(seed=32, length=LENGTH)
    with disk_server(tmp_path) as server:
        engine = start(engines, server, DENSE)
        try:
            answer(engine, prompt)
            local = answer(engine, prompt)
            engine.drain()
            await_written(engine)
        finally:
            engine.close()
    (segment,) = (file for file in (tmp_path / "disk").iterdir() if file.stat().st_size > 1 << 20)
    with segment.open("r+b") as stream:
        # Somewhere in the middle of what was written.
        stream.seek(1 << 19)
        damaged = bytes(byte ^ 0x10 for byte in stream.read(64))
        stream.seek(1 << 19)
        stream.write(damaged)
    with disk_server(tmp_path) as server:
        engine = start(engines, server, DENSE)
        try:
            restored = answer(engine, prompt)
            assert restored.cached < local.cached
            assert restored.tokens == local.tokens
            engine.drain()
            assert probe.faults(engine) == {}
        finally:
            engine.close()

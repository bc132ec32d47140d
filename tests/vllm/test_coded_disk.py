"""Blocks that went to disk in a lossless code and came back are those that the engine computed, bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.disk_servers import await_written, disk_server, stats_of
from tests.vllm.engine import Engine, EnginePool, make_prompt
from tests.vllm.equality import answer, one_boundary, restorable, restored_answer
from tests.vllm.pool_probe import Entry, unhurried
from tests.vllm.restarted import start
from tests.vllm.tiny_models import DENSE, GDN, TinyModel

pytestmark = pytest.mark.vllm

LENGTH = 1400
RECORD = re.compile(rb"KVOR(..)\0\0", re.DOTALL)
"""Its header's first bytes, with the version; docs/format.md."""
CODED = b"\2\0"


def count_records(folder: Path) -> tuple[int, int]:
    """Of a folder of the disk tier: records that are coded, and others."""
    versions = [
        found[1]
        for file in folder.glob("segment-*")
        for found in RECORD.finditer(file.read_bytes())
        if found.start() % 64 == 0
    ]
    coded = versions.count(CODED)
    return coded, len(versions) - coded


def find_entries(engine: Engine, names: Iterable[tuple[int, str]]) -> list[Entry]:
    """Where in memory these blocks are now."""
    connector: Any = probe.scheduler_connector(engine)
    client: Any = connector._scheduler._parts.cache
    found = []
    for group, name in names:
        with unhurried(client):
            acquired = client.acquire_entries(group, bytes.fromhex(name))
        assert acquired.lease is not None, (group, name)
        client.release(acquired.lease)
        found.append(Entry(group, name, int(acquired.groups[0].addresses[0])))
    return found


@pytest.mark.parametrize("model", [DENSE, GDN], ids=lambda model: model.name)
def test_what_was_coded_on_disk_equals_the_engines_own_hit_bit_for_bit(
    engines: EnginePool, tmp_path: Path, model: TinyModel
) -> None:
    """Keys and values in bfloat16; recurrent states in float32."""
    engines.leave_process()
    folder = tmp_path / "disk"
    folder.mkdir(mode=0o700)
    short, long = one_boundary(model), make_prompt(seed=36, length=LENGTH)
    with disk_server(tmp_path, disk_compress="on") as server:
        engine = start(engines, server, model)
        try:
            assert answer(engine, short).cached == 0
            names = probe.names(engine)
            assert sorted(group for group, _ in names) == list(range(len(model.groups)))
            answer(engine, long)
            local = [answer(engine, prompt) for prompt in (short, long)]
            assert [one.cached for one in local] == [restorable(model, len(prompt)) for prompt in (short, long)]
            engine.drain()
            written = await_written(engine)
        finally:
            engine.close()
    assert count_records(folder) == (written, 0)
    # That was kill -9: what the next server has, it has from the disk.
    with disk_server(tmp_path) as server:
        engine = start(engines, server, model)
        try:
            assert probe.pool_stats(engine)["readable"] == 0
            restored = [answer(engine, prompt) for prompt in (short, long)]
            assert restored == local
            assert [one.cached for one in restored] == [one.cached for one in local]
            engine.drain()
            counts = stats_of(engine).traffic["disk"]
            assert counts["promoted"] == written
            assert counts["quarantined"] == counts["late"] == counts["missing"] == 0
            # Bytes that are wrong would have been seen.
            for entry in find_entries(engine, names):
                with probe.zeroed(engine, entry):
                    assert restored_answer(engine, short) != local[0], entry
            assert restored_answer(engine, short) == local[0]
            assert probe.faults(engine) == {}
        finally:
            engine.close()

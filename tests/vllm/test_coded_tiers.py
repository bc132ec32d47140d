"""Blocks that went to disk or to Valkey in a lossless code and came back are those that the engine computed, bit for
bit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kit.tiers import valkey_server
from tests.vllm import connector_probe as probe
from tests.vllm.cache_server import SharedServer
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
    """Counts in a folder of the disk tier records that are coded, and others."""
    versions = [
        found[1]
        for file in folder.glob("segment-*")
        for found in RECORD.finditer(file.read_bytes())
        if found.start() % 64 == 0
    ]
    coded = versions.count(CODED)
    return coded, len(versions) - coded


@dataclass(frozen=True)
class Servers:
    """One after the other, with a tier that stays."""

    tier: str
    coding: Mapping[str, str]
    """Settings by which records are coded."""
    serve: Callable[..., AbstractContextManager[SharedServer]]
    count: Callable[[], tuple[int, int]]
    """Records of the tier that are coded, and others."""


def find_entries(engine: Engine, names: Iterable[tuple[int, str]]) -> list[Entry]:
    """Finds where in memory these blocks are now."""
    connector: Any = probe.scheduler_connector(engine)
    client: Any = connector.scheduler_side.parts.cache
    found = []
    for group, name in names:
        with unhurried(client):
            acquired = client.acquire_entries(group, bytes.fromhex(name))
        assert acquired.lease is not None, (group, name)
        client.release(acquired.lease)
        found.append(Entry(group, name, int(acquired.groups[0].addresses[0])))
    return found


@contextmanager
def disks(room: Path) -> Iterator[Servers]:
    """Makes servers that share a disk: the next one has its blocks from it."""
    folder = room / "disk"
    folder.mkdir(mode=0o700)

    def serve(**settings: str) -> AbstractContextManager[SharedServer]:
        return disk_server(room, **settings)

    yield Servers(tier="disk", coding={"disk_compress": "on"}, serve=serve, count=lambda: count_records(folder))


@contextmanager
def valkeys(room: Path) -> Iterator[Servers]:
    """It has it from a store that stays."""
    with valkey_server.serve(room / "valkey") as store:

        @contextmanager
        def serve(**settings: str) -> Iterator[SharedServer]:
            far = {"valkey": f"valkey://127.0.0.1:{store.port}", "remote_timeout": "20s", "promote_deadline": "30s"}
            with SharedServer(room, **far, **settings) as server:
                server.start()
                yield server

        def count() -> tuple[int, int]:
            versions = "local all = {0, 0}; for _, key in ipairs(redis.call('keys', 'kvoffload:1:*')) do "
            versions += "local version = redis.call('getrange', key, 4, 4):byte(); all[version] = all[version] + 1 end"
            plain, coded = valkey_server.ask(store, "eval", f"{versions}; return all", "0").split()
            return int(coded), int(plain)

        yield Servers(tier="valkey", coding={"remote_compress": "on"}, serve=serve, count=count)


@pytest.mark.parametrize(
    ("kind", "model"),
    [pytest.param(disks, DENSE, marks=pytest.mark.campaign), (disks, GDN), (valkeys, DENSE)],
    ids=["disk-dense", "disk-gdn", "valkey-dense"],
)
def test_what_was_coded_equals_the_engines_own_hit_bit_for_bit(
    engines: EnginePool, tmp_path: Path, kind: Callable[[Path], AbstractContextManager[Servers]], model: TinyModel
) -> None:
    """Keys and values in bfloat16; recurrent states in float32."""
    engines.leave_process()
    short, long = one_boundary(model), make_prompt(seed=36, length=LENGTH)
    with kind(tmp_path) as servers:
        with servers.serve(**servers.coding) as server:
            engine = start(engines, server, model)
            try:
                assert answer(engine, short).cached == 0
                names = probe.names(engine)
                assert sorted(group for group, _ in names) == list(range(len(model.groups)))
                answer(engine, long)
                local = [answer(engine, prompt) for prompt in (short, long)]
                assert [one.cached for one in local] == [restorable(model, len(prompt)) for prompt in (short, long)]
                engine.drain()
                written = await_written(engine, servers.tier)
                (place,) = stats_of(engine).places
                assert place.coded_records == written
                assert 0 < place.coded_stored_bytes < 0.95 * place.coded_bytes
            finally:
                engine.close()
        assert servers.count() == (written, 0)
        # That was kill -9.
        with servers.serve() as server:
            engine = start(engines, server, model)
            try:
                assert probe.pool_stats(engine)["readable"] == 0
                restored = [answer(engine, prompt) for prompt in (short, long)]
                assert restored == local
                assert [one.cached for one in restored] == [one.cached for one in local]
                engine.drain()
                counts = stats_of(engine).traffic[servers.tier]
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

"""Rows of vLLM's CPU tier go to a real server's memory and come back as they were, or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import Ask
from kvoffload.connector.secondary import transfers as tier_transfers
from kvoffload.connector.secondary.transfers import JOB_LIMIT, ROWS, TierTransfers, TransferSettings, map_rows
from kvoffload.transfer.host_engine import HostEngine
from tests.kit.children import child
from tests.kit.connector.tiers import ROW_BYTES, ROW_COUNT, TOKENS, WAIT_S, SmallTier, names_of, open_tier, wait_for
from tests.unit.client.conftest import SERVER


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("server") / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves"):
        yield path


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that has to wait for its turn on a busy machine must not decide what a test finds."""
    monkeypatch.setattr(tier_transfers, "STORE_WAIT_S", 2 * WAIT_S)


@pytest.fixture
def tier(server: Path, request: pytest.FixtureRequest) -> Iterator[SmallTier]:
    tier = open_tier(server, request.node.name, verify_always=True)
    yield tier
    tier.close()


def flip_a_byte(tier: SmallTier, name: bytes) -> None:
    """Of a record in the server's memory, which stays what it is called."""
    found = tier.client.acquire_entries(0, name, shards=(0,))
    assert found.lease is not None
    tier.client.memory(found.lease.memory_id).view(int(found.groups[0].addresses[0]), ROW_BYTES)[5] ^= 1
    tier.client.release(found.lease)


def test_rows_come_back_as_they_were(tier: SmallTier) -> None:
    names, before = names_of(1, 2, 3), tier.rows.copy()
    stored = tier.store(names, [4, 9, 0])
    assert (stored.is_whole, stored.chunks) == (True, 3)
    loaded = tier.load(names, [20, 30, 40])
    assert loaded.is_whole
    assert (tier.rows[[20, 30, 40]] == before[[4, 9, 0]]).all()
    others = np.setdiff1d(np.arange(ROW_COUNT), [20, 30, 40])
    assert (tier.rows[others] == before[others]).all()
    assert tier.client.stats().leases == 0


def test_chunks_of_a_real_models_size_go_through_a_pool_that_is_too_small_for_them(tmp_path: Path) -> None:
    """160 chunks of 2 MiB, as Llama-3.1-8B has them, go into 128 MiB: what comes back is right, and nothing is held."""
    settings = ("--set", f"server={tmp_path / 's'}", "--set", "memory=128MiB")
    with child(["-m", "kvoffload", "serve", "--adopt-wait", "0", *settings]):
        tier = open_tier(tmp_path / "s", "large", verify_always=True, row_bytes=2 << 20)
        before, jobs = tier.rows[:8].copy(), [names_of(*((job, row) for row in range(8))) for job in range(20)]
        for names in jobs:
            assert tier.store(names, list(range(8))).is_whole
        assert tier.client.stats().evicted > 0
        back = 0
        for names in reversed(jobs):
            tier.rows[8:16] = 0
            loaded = tier.load(names, list(range(8, 16)))
            for position in loaded.kept:
                assert (tier.rows[8 + position] == before[position]).all()
            back += len(loaded.kept)
        assert 8 <= back < 160
        assert tier.client.stats().leases == 0
        tier.close()


def test_what_the_cache_has_is_not_copied_again(tier: SmallTier) -> None:
    names, before = names_of(1, 2), tier.rows.copy()
    assert tier.store(names[:1], [1]).is_whole
    assert tier.store(names, [2, 3]).is_whole
    assert tier.load(names, [20, 21]).is_whole
    assert (tier.rows[[20, 21]] == before[[1, 3]]).all()


def test_more_chunks_than_slots_are_stored_one_after_the_other(tier: SmallTier) -> None:
    """Slots are held ready for fewer, so that the job has to wait for more."""
    names, before = names_of(*range(30)), tier.rows.copy()
    assert tier.client.most_slots(0) < 30
    assert tier.store(names, list(range(30))).is_whole
    assert tier.load(names, list(range(30, 60))).is_whole
    assert (tier.rows[30:60] == before[:30]).all()


def test_a_chunk_that_is_gone_ends_the_load_before_it(tier: SmallTier) -> None:
    names, before = names_of(*range(5)), tier.rows.copy()
    assert tier.store(names, [0, 1, 2, 3, 4]).is_whole
    tier.client.invalidate(0, names[3])
    tier.client.stats()
    loaded = tier.load(names, [20, 21, 22, 23, 24])
    assert (loaded.is_whole, loaded.kept) == (False, {0, 1, 2})
    assert (tier.rows[[20, 21, 22]] == before[:3]).all()
    assert (tier.rows[[23, 24]] == before[[23, 24]]).all()


def test_a_record_with_other_bytes_is_a_miss_and_is_forgotten(tier: SmallTier) -> None:
    names = names_of(*range(3))
    assert tier.store(names, [0, 1, 2]).is_whole
    flip_a_byte(tier, names[1])
    assert tier.load(names, [20, 21, 22]).kept == {0, 2}
    tier.client.stats()
    assert tier.client.lookup(0, b"".join(names)).tolist() == [True, False, True]


def test_records_are_trusted_within_memory_where_settings_say_so(server: Path) -> None:
    tier = open_tier(server, "trusting", verify_always=False)
    try:
        names = names_of(1)
        assert tier.store(names, [0]).is_whole
        flip_a_byte(tier, names[0])
        assert tier.load(names, [20]).is_whole
        assert (tier.rows[20] != tier.rows[0]).sum() == 1
    finally:
        tier.close()


def test_another_identity_finds_nothing(server: Path, tier: SmallTier) -> None:
    names = names_of(1, 2)
    assert tier.store(names, [0, 1]).is_whole
    other = open_tier(server, "another one")
    try:
        before = other.rows.copy()
        assert other.load(names, [20, 21]).kept == frozenset()
        assert (other.rows == before).all()
    finally:
        other.close()


def test_without_its_server_every_job_ends_without_a_chunk(tmp_path: Path) -> None:
    names = names_of(1, 2)
    with child(["-c", SERVER, str(tmp_path / "s"), "0"], says="serves") as process:
        tier = open_tier(tmp_path / "s", "left alone")
        assert tier.store(names, [0, 1]).is_whole
        process.kill()
        process.wait()
    try:
        wait_for(lambda: not tier.client.is_served)
        before = tier.rows.copy()
        assert tier.load(names, [20, 21]).kept == frozenset()
        assert tier.store(names_of(3), [3]).kept == frozenset()
        assert (tier.rows == before).all()
        assert len(tier.transfers) == 0
    finally:
        tier.close()


class SilentCache:
    """It is served, and never has a slot or an answer."""

    is_served = True
    has_tiers = False

    def __init__(self) -> None:
        self.cancelled: list[object] = []

    def lookup(self, group: int, hashes: bytes) -> Any:
        return np.zeros(len(hashes) // 32, np.bool_)

    def take(self, group: int, count: int) -> list[int]:
        return []

    def start_acquire(self, ask: Ask, **settings: object) -> object:
        return object()

    def poll(self, pending: object) -> None:
        return None

    def cancel(self, pending: object) -> None:
        self.cancelled.append(pending)


@pytest.fixture
def silent() -> Iterator[SimpleNamespace]:
    rows, now = np.zeros((ROW_COUNT, ROW_BYTES), np.uint8), [0.0]
    cache: Any = SilentCache()
    engine = HostEngine(map_rows(rows=ROW_COUNT, row_bytes=ROW_BYTES), {ROWS: rows.ctypes.data}, threads=1)
    settings = TransferSettings(fingerprint=bytes(32), record_bytes=ROW_BYTES, block_tokens=TOKENS)
    transfers = TierTransfers(cache, engine, settings, clock=lambda: now[0])
    yield SimpleNamespace(cache=cache, transfers=transfers, now=now)
    transfers.close()


def test_jobs_are_bounded_and_those_beyond_fail_at_once(silent: SimpleNamespace) -> None:
    transfers: TierTransfers = silent.transfers
    for job in range(JOB_LIMIT):
        (transfers.store if job % 2 else transfers.load)(job, names_of(job), [0])
    assert (len(transfers), transfers.poll()) == (JOB_LIMIT, [])
    transfers.store(JOB_LIMIT, names_of("store"), [1])
    transfers.load(JOB_LIMIT + 1, names_of("load"), [2])
    assert [(one.job, one.kept) for one in transfers.poll()] == [(JOB_LIMIT, frozenset()), (JOB_LIMIT + 1, frozenset())]
    assert len(transfers) == JOB_LIMIT


def test_a_store_that_gets_no_slot_is_given_up(silent: SimpleNamespace) -> None:
    silent.transfers.store(1, names_of(1), [0])
    silent.now[0] = tier_transfers.STORE_WAIT_S
    assert silent.transfers.poll() == []
    silent.now[0] += 1
    (ended,) = silent.transfers.poll()
    assert (ended.job, ended.kept, len(silent.transfers)) == (1, frozenset(), 0)


def test_a_drain_ends_what_has_not_begun(silent: SimpleNamespace) -> None:
    silent.transfers.store(1, names_of(1), [0])
    silent.transfers.load(2, names_of(2), [1])
    silent.transfers.drain()
    assert [(one.job, one.kept) for one in silent.transfers.poll()] == [(1, frozenset()), (2, frozenset())]
    assert (len(silent.transfers), len(silent.cache.cancelled)) == (0, 1)


def test_a_drain_waits_for_copies_and_tells_them(tier: SmallTier) -> None:
    names = names_of(*range(8))
    wait_for(lambda: tier.client.ready_slots()[0] == 8)
    tier.transfers.store(1, names, list(range(8)))
    tier.transfers.drain()
    (ended,) = tier.transfers.poll()
    assert ended.is_whole
    tier.client.stats()  # the server has heard of all of them
    assert tier.load(names, list(range(20, 28))).is_whole


def test_a_job_is_known_until_it_was_told(silent: SimpleNamespace) -> None:
    transfers: TierTransfers = silent.transfers
    transfers.store(1, names_of(1), [0])
    assert (transfers.knows(1), transfers.knows(2)) == (True, False)
    transfers.drain()
    assert transfers.knows(1)
    transfers.poll()
    assert not transfers.knows(1)


def test_a_chunk_is_one_block_of_one_piece() -> None:
    page_map = map_rows(rows=10, row_bytes=ROW_BYTES)
    assert page_map.block_runs(0, 3) == [(ROWS, 3 * ROW_BYTES, ROW_BYTES, 0)]

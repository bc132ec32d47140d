"""The class that vLLM makes for a tier: what its scheduler asks, with a real server behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="vLLM with secondary tiers is not installed")

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.secondary import transfers as tier_transfers
from kvoffload.connector.secondary_tier import KVOffloadTier
from kvoffload.engines import cache_access
from kvoffload.errors import ConfigError, UnsupportedError
from tests.kit.children import child
from tests.kit.connector.engine_configs import full, make_config, make_vllm_config
from tests.kit.connector.tier_configs import make_rows
from tests.kit.connector.tiers import ROW_BYTES, ROW_COUNT, WAIT_S, wait_for
from tests.unit.client.conftest import SERVER

REQUEST = ReqContext(req_id="request")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("server") / "s"
    with child(["-c", SERVER, str(path), "0"], says="serves"):
        yield path


class Scheduler:
    """The part of vLLM's scheduler that makes a tier and asks it."""

    def __init__(
        self, server: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], None] | None = None, **given: Any
    ) -> None:
        monkeypatch.setattr(tier_transfers, "STORE_WAIT_S", 2 * WAIT_S)
        config, cache = make_vllm_config(), make_config((["a"], full(16)))
        if change is not None:
            change(config)
        rows = make_rows(config, cache)
        monkeypatch.setattr(
            vllm_compat,
            "find_engine_of_tier",
            lambda engine_id: (config, cache) if engine_id == rows.engine_id else None,
        )
        self.rows = np.random.default_rng(3).integers(0, 256, (ROW_COUNT, ROW_BYTES), np.uint8)
        self.view = memoryview(self.rows)
        settings = {"server": str(server), "acquire_deadline": "20s", **given}
        tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "KVOffloadTier", "module_path": "kvoffload.connector.secondary_tier", **settings},
            self.view,
            SimpleNamespace(config=rows, tokens_per_block=(16,), blocks_per_chunk=1),  # type: ignore[arg-type]
        )
        assert isinstance(tier, KVOffloadTier)
        self.tier = tier
        self.jobs = 0

    def job(self, keys: list[OffloadKey], rows: list[int], *, is_promotion: bool) -> JobResult:
        self.jobs += 1
        job = TransferJob(self.jobs, keys, np.array(rows, np.int32), is_promotion, REQUEST)
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        (result,) = wait_for(lambda: list(self.tier.get_finished_jobs()))
        assert result.job_id == self.jobs
        if self.tier.cache.is_served:
            self.tier.cache.stats()  # it has heard of what was stored
        return result

    def look(self, *keys: OffloadKey) -> list[LookupResult]:
        return [self.tier.lookup(key, REQUEST) for key in keys]


def keys_of(*chunks: int, group: int = 0) -> list[OffloadKey]:
    return [make_offload_key(bytes([chunk]) * 32, group) for chunk in chunks]


Open = Callable[..., Scheduler]
HIT, MISS = LookupResult.HIT, LookupResult.MISS


@pytest.fixture
def open_scheduler(server: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Each test has a model of its own on the server, and may open several engines of it."""
    opened: list[Scheduler] = []

    def open_one(change: Callable[[Any], None] | None = None, *, server: Path = server, **given: Any) -> Scheduler:
        def rename(config: Any) -> None:
            config.model_config.model = request.node.name
            if change is not None:
                change(config)

        opened.append(Scheduler(server, monkeypatch, rename, **given))
        assert opened[-1].tier.cache.wait_until_served(WAIT_S)
        return opened[-1]

    yield open_one
    for one in opened:
        one.tier.shutdown()


def test_what_one_engine_stored_the_next_one_loads(open_scheduler: Open) -> None:
    one, keys = open_scheduler(verify="always"), keys_of(1, 2, 3)
    assert one.look(*keys) == [MISS] * 3
    stored = one.job(keys, [5, 6, 7], is_promotion=False)
    assert (stored.success, stored.transfer_bytes) == (True, 3 * ROW_BYTES)
    assert one.look(*keys) == [HIT] * 3
    other = open_scheduler(verify="always")
    assert other.look(*keys, *keys_of(4)) == [HIT, HIT, HIT, MISS]
    assert other.job(keys, [20, 21, 22], is_promotion=True).success
    assert (other.rows[[20, 21, 22]] == one.rows[[5, 6, 7]]).all()
    assert (one.tier.faults, other.tier.faults) == ({}, {})


def test_groups_have_chunks_of_their_own(open_scheduler: Open) -> None:
    one = open_scheduler()
    assert one.job(keys_of(1, group=1), [0], is_promotion=False).success
    assert one.look(*keys_of(1, group=0), *keys_of(1, group=1)) == [MISS, HIT]


def test_an_engine_with_other_weights_finds_nothing(open_scheduler: Open) -> None:
    one, keys = open_scheduler(), keys_of(1)
    assert one.job(keys, [0], is_promotion=False).success
    other = open_scheduler(lambda config: vars(config.model_config).update(revision="1" * 40))
    assert other.look(*keys) == [MISS]
    before = other.rows.copy()
    assert not other.job(keys, [9], is_promotion=True).success
    assert (other.rows == before).all()


def test_a_load_of_what_is_gone_names_what_came(open_scheduler: Open) -> None:
    one, keys = open_scheduler(), keys_of(1, 2, 3)
    assert one.job(keys, [0, 1, 2], is_promotion=False).success
    one.tier.cache.invalidate(0, one.tier.name_key(keys[2]))
    one.tier.cache.stats()
    loaded = one.job(keys, [20, 21, 22], is_promotion=True)
    assert (loaded.success, loaded.successful_keys, loaded.transfer_bytes) == (False, tuple(keys[:2]), 2 * ROW_BYTES)
    assert one.tier.faults == {}


def test_a_chunk_whose_load_failed_is_not_promised_to_its_request_again(open_scheduler: Open) -> None:
    """Else it would be promised, loaded and lost for ever."""
    one, keys = open_scheduler(verify="always"), keys_of(1)
    assert one.job(keys, [0], is_promotion=False).success
    assert one.look(*keys) == [HIT]
    found = one.tier.cache.acquire_entries(0, one.tier.name_key(keys[0]), shards=(0,))
    assert found.lease is not None
    record = one.tier.cache.memory(found.lease.memory_id).view(int(found.groups[0].addresses[0]), ROW_BYTES)
    record[0] ^= 1
    one.tier.cache.release(found.lease)
    assert not one.job(keys, [20], is_promotion=True).success
    assert one.job(keys, [0], is_promotion=False).success
    assert one.look(*keys) == [MISS]
    one.tier.on_request_finished(REQUEST)
    assert one.look(*keys) == [HIT]


def test_after_a_reset_of_the_engines_caches_names_are_others(open_scheduler: Open) -> None:
    """vLLM resets them when weights change, and tells no tier whether they did."""
    one, keys = open_scheduler(), keys_of(1)
    assert one.job(keys, [0], is_promotion=False).success
    one.tier.drain_jobs()
    assert one.look(*keys) == [MISS]
    assert one.job(keys, [1], is_promotion=False).success
    assert one.look(*keys) == [HIT]
    assert one.job(keys, [20], is_promotion=True).success
    assert (one.rows[20] == one.rows[1]).all()
    other = open_scheduler()
    assert other.job(keys, [20], is_promotion=True).success
    assert (other.rows[20] == one.rows[0]).all()


def test_an_engine_with_adapters_keeps_to_itself(open_scheduler: Open, caplog: pytest.LogCaptureFixture) -> None:
    def with_adapters(config: Any) -> None:
        config.lora_config = SimpleNamespace(lora_dtype=config.model_config.dtype)

    one, keys = open_scheduler(with_adapters), keys_of(1)
    assert "LoRA" in caplog.text
    assert one.job(keys, [0], is_promotion=False).success
    assert one.look(*keys) == [HIT]
    assert open_scheduler(with_adapters).look(*keys) == [MISS]


def test_without_a_server_an_engine_starts_and_everything_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_access, "ABSENT_WAIT_S", 0.05)
    one, keys = Scheduler(tmp_path / "nobody", monkeypatch), keys_of(1)
    try:
        assert one.look(*keys) == [MISS]
        assert not one.job(keys, [0], is_promotion=False).success
        assert not one.job(keys, [0], is_promotion=True).success
        one.tier.on_schedule_end(SimpleNamespace())  # type: ignore[arg-type]
        one.tier.drain_jobs()
        assert one.tier.faults == {}
    finally:
        one.tier.shutdown()


def test_a_server_that_ends_makes_misses(tmp_path: Path, open_scheduler: Open) -> None:
    with child(["-c", SERVER, str(tmp_path / "s"), "0"], says="serves") as process:
        one, keys = open_scheduler(server=tmp_path / "s"), keys_of(1)
        assert one.job(keys, [0], is_promotion=False).success
        process.kill()
        process.wait()
    wait_for(lambda: not one.tier.cache.is_served)
    assert one.look(*keys) == [MISS]
    assert not one.job(keys, [20], is_promotion=True).success
    assert not one.job(keys_of(2), [0], is_promotion=False).success
    assert one.tier.faults == {}


def test_a_fault_of_ours_is_a_miss_and_every_job_is_answered(
    open_scheduler: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, keys = open_scheduler(), keys_of(1)

    def fail(*given: object, **named: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr(one.tier, "name_key", fail)
    assert one.look(*keys) == [MISS]
    assert one.look(*keys) == [MISS]
    assert not one.job(keys, [0], is_promotion=False).success
    assert not one.job(keys, [0], is_promotion=True).success
    assert one.tier.faults == {"lookup": 2, "_begin": 2}
    assert caplog.text.count("a fault in lookup") == 1


def test_nothing_of_the_memory_is_held_after_the_end(open_scheduler: Open) -> None:
    """vLLM closes the memory then, which Python refuses while there is a view of it."""
    one = open_scheduler()
    assert one.job(keys_of(1), [0], is_promotion=False).success
    one.tier.shutdown()
    one.view.release()


def test_a_setting_that_there_is_not_is_named(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown setting 'sever'.*did you mean 'server'"):
        Scheduler(server, monkeypatch, sever="x")


def test_an_engine_that_nothing_is_known_of_does_not_start(server: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_compat, "find_engine_of_tier", lambda engine_id: None)
    config, cache = make_vllm_config(), make_config((["a"], full(16)))
    spec = SimpleNamespace(config=make_rows(config, cache), tokens_per_block=(16,), blocks_per_chunk=1)
    with pytest.raises(UnsupportedError, match="does not show its configuration to secondary tiers"):
        KVOffloadTier(spec, memoryview(np.zeros((2, ROW_BYTES), np.uint8)), "ours", server=str(server))  # type: ignore[arg-type]


def test_the_base_class_asks_for_nothing_that_is_not_there() -> None:
    assert issubclass(KVOffloadTier, SecondaryTierManager)
    assert not getattr(KVOffloadTier, "__abstractmethods__", frozenset())


# ---- whose tier it is ----


def make_a_tier(vllm_config: object, kv_cache_config: object, engine_id: str) -> object:
    """Like the connector that has both among its arguments."""
    return vllm_compat.find_engine_of_tier(engine_id)


def test_the_engine_is_the_one_whose_connector_is_being_made() -> None:
    config, cache = object.__new__(VllmConfig), object.__new__(KVCacheConfig)
    config.kv_transfer_config = SimpleNamespace(engine_id="mine")  # type: ignore[assignment]
    assert make_a_tier(config, cache, "mine") == (config, cache)
    assert make_a_tier(config, cache, "another") is None
    assert make_a_tier(SimpleNamespace(), cache, "mine") is None
    assert vllm_compat.find_engine_of_tier("mine") is None

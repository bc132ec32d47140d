"""The worker side's hold on the engine's memory: proved and tested when it comes, and let go of with nothing kept."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvoffload.connector import worker_side
from kvoffload.connector.common.step_plan import WorkerReport
from kvoffload.connector.engine.geometry import EngineCache, describe_cache
from kvoffload.errors import IdentityError, NativeError, RegistrationError, SelfTestError, ServerError
from kvoffload.keys.identity import Identity
from kvoffload.kvspec import KVGeometry
from kvoffload.protocol import Register
from kvoffload.transfer import CopyDirection, CopyEngine, open_engine
from tests.kit.connector.engine_configs import full, make_config, make_tensors
from tests.kit.connector.local_client import LocalPlaces
from tests.kit.connector.workers import (
    NUM_BLOCKS,
    PAGE,
    Move,
    SharedCache,
    block_of,
    collect,
    fill,
    identify,
    join_plans,
    load,
    load_job,
    make_cache,
    make_worker,
    memory_of,
    replace_engine,
    save,
    save_job,
    start,
)
from tests.kit.transfer.stand_ins import FailingEngine, ForgetfulEngine, HeldEngine


def test_facts_name_stored_groups_by_their_place_in_the_block_tables() -> None:
    worker, _ = start(make_worker())
    assert worker.facts is not None
    assert [(group.index, group.record_bytes) for group in worker.facts.groups] == [(0, 152), (1, PAGE)]
    assert worker.facts.num_blocks == NUM_BLOCKS
    geometry, _ = make_cache()
    assert worker.facts.fingerprint == identify(geometry).fingerprint()
    worker.close()


def test_the_self_test_leaves_every_byte_as_it_was() -> None:
    geometry, tensors = make_cache()
    fill(tensors)
    before = memory_of(tensors).clone()
    worker = make_worker()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    assert torch.equal(memory_of(tensors), before)
    worker.close()


def test_two_blocks_are_enough_for_the_self_test() -> None:
    geometry, tensors = make_cache(num_blocks=2)
    worker = make_worker()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()


def test_a_copy_that_loses_bytes_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_forgetful(*given: object, **named: object) -> CopyEngine:
        return ForgetfulEngine(open_engine(*given, **named))  # type: ignore[arg-type]

    monkeypatch.setattr(worker_side, "open_engine", open_forgetful)
    geometry, tensors = make_cache()
    worker = make_worker()
    with pytest.raises(SelfTestError):
        worker.register(geometry, tensors, scale_views={}, identify=identify)
    assert not worker.registration.is_registered
    assert worker.facts is None


def test_an_engine_that_cannot_be_identified_is_not_held() -> None:
    def refuse(geometry: KVGeometry) -> Identity:
        raise IdentityError("no revision", remedy="give one")

    geometry, tensors = make_cache()
    worker = make_worker()
    with pytest.raises(IdentityError):
        worker.register(geometry, tensors, scale_views={}, identify=refuse)
    assert not worker.registration.is_registered
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()


def test_records_survive_a_sleep_of_the_engine() -> None:
    """Blocks saved before are loaded into the new cache, which is registered at other addresses."""
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    save(worker, Move(1, 1, 0))
    before = worker.facts
    assert before is not None
    worker.unregister()
    assert worker.facts == replace(before, places=())
    geometry, fresh = make_cache()
    worker.register(geometry, fresh, scale_views={}, identify=identify)
    assert load(worker, Move(1, 3, 0))
    assert block_of(fresh, 3) == wanted
    worker.close()


def test_registering_twice_without_unregistering_is_refused() -> None:
    worker, _ = start(make_worker())
    geometry, tensors = make_cache()
    with pytest.raises(RegistrationError):
        worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()


@pytest.mark.parametrize("last_job", ["none", "good", "refused", "failing in its copy"])
def test_after_unregistering_nothing_of_ours_holds_the_engines_memory(
    last_job: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that failed and was not asked about yet must not hold it either."""
    worker, tensors = start(make_worker())
    storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors.values()]
    views = [weakref.ref(tensor) for tensor in tensors.values()]
    if last_job == "good":
        worker.submit(save_job(worker, Move(1, 1, 0)))
    elif last_job == "refused":
        worker.submit(save_job(worker, Move(1, 1, 0), Move(1, NUM_BLOCKS, 1)))
    elif last_job != "none":
        replace_engine(worker, lambda inner: FailingEngine(inner, CopyDirection.SAVE))
        worker.submit(save_job(worker, Move(1, 1, 0), Move(1, 3, 1)))
    worker.unregister()
    assert [record.getMessage() for record in caplog.records if "still referenced" in record.getMessage()] == []
    del tensors
    gc.collect()
    assert [view() for view in views] == [None, None]
    assert [storage() for storage in storages] == [None, None]
    worker.close()


def test_what_was_on_its_way_ends_before_the_memory_is_let_go() -> None:
    worker, tensors = start(make_worker())
    wanted = block_of(tensors, 1)
    save(worker, Move(1, 1, 0))
    worker.submit(join_plans(save_job(worker, Move(1, 3, 1), job=2), load_job(worker, Move(1, 2, 0), name="a")))
    worker.unregister()
    assert block_of(tensors, 2) == wanted
    finished, failed, report = collect(worker, 2)
    assert (finished, failed, report.saved, report.failed) == ({"a"}, set(), {2: 1}, frozenset())
    assert worker.shared.record(Move(1, 3, 1)).tolist() == block_of(tensors, 3)


def test_jobs_without_a_registered_cache_fail() -> None:
    worker, _ = start(make_worker())
    worker.unregister()
    worker.submit(load_job(worker, Move(1, 2, 0), name="a"))
    geometry, tensors = make_cache()
    assert worker.take_results(is_idle=True)[:2] == ({"a"}, {"a"})
    worker.submit(load_job(worker, Move(1, 2, 0), name="b"))
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    assert collect(worker, 1)[:2] == ({"b"}, {"b"})
    worker.close()


def test_a_cache_with_other_pages_is_not_registered_in_place_of_the_first() -> None:
    """Blocks saved before, and engines that share them, have other records."""
    worker, _ = start(make_worker())
    before = worker.facts
    assert before is not None
    worker.unregister()
    config = make_config((["a"], full(head_size=16)), num_blocks=NUM_BLOCKS)
    tensors = make_tensors(config)
    cache = EngineCache(config=config, tensors=tensors, sharing={}, layout="LBHNC", hash_block_size=4)
    with pytest.raises(RegistrationError, match="other records"):
        worker.register(describe_cache(cache), tensors, scale_views={}, identify=identify)
    assert not worker.registration.is_registered
    assert worker.facts == replace(before, places=())
    worker.close()


def test_a_cache_that_cannot_be_opened_leaves_nothing_registered() -> None:
    class RefusingOnce(SharedCache):
        has_refused = False

        def open(self, register: Register) -> LocalPlaces:
            if not self.has_refused:
                self.has_refused = True
                raise ServerError("refused", remedy="ask somebody else")
            return super().open(register)

    worker = make_worker(shared=RefusingOnce())
    geometry, tensors = make_cache()
    with pytest.raises(ServerError):
        worker.register(geometry, tensors, scale_views={}, identify=identify)
    assert not worker.registration.is_registered
    assert worker.facts is None
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.close()


def test_the_cache_is_joined_once_as_this_rank_of_the_engine() -> None:
    worker, _ = start(make_worker(rank=1, ranks=2))
    worker.unregister()
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    (register,) = worker.shared.registers
    assert (register.rank, register.ranks) == (1, 2)
    assert register.fingerprint == identify(geometry).fingerprint()
    assert [(group.record_bytes, group.shards) for group in register.groups] == [(152, 2), (PAGE, 2)]
    assert [places.is_closed for places in worker.shared.opened] == [False]
    worker.close()


def test_a_copy_that_does_not_end_is_left_behind_within_the_bound_and_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may still write: its record stays, and the copy engine keeps the memory of the cache."""

    class HangingEngine(HeldEngine):
        def close(self, timeout_s: float = 0.0) -> None:
            raise NativeError("the copy engine was not closed: a copy still runs")

    opened: list[HangingEngine] = []

    def open_hanging(*given: object, **named: object) -> HangingEngine:
        opened.append(HangingEngine(open_engine(*given, **named)))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(worker_side, "open_engine", open_hanging)
    worker, _ = start(make_worker())
    opened[0].hold()
    worker.submit(join_plans(save_job(worker, Move(1, 1, 0)), load_job(worker, name="a")))
    memory = weakref.ref(worker.shared.client.memory(worker.shared.place.memory_id))
    worker.unregister()
    assert opened[0].waits[-1] == worker_side.DRAIN_TIMEOUT_S
    assert "a copy still runs" in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelname == "ERROR"
    assert worker.take_results(is_idle=True) == ({"a"}, {"a"}, WorkerReport({1: 1}, frozenset({1}), places={0: ()}))
    worker.close()
    worker.shared.client.sessions.clear()
    del worker.shared.client.current
    gc.collect()
    assert memory() is not None
    opened[0].inner.close()

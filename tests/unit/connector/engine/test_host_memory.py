"""The cache's memory as the driver knows it: from its beginning as it becomes ready, and out again with its server."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.cache import SegmentMap
from kvoffload.connector import worker_side
from kvoffload.connector.common.step_plan import StepPlan
from kvoffload.connector.engine.host_memory import START_WAIT_S, HostMemory, RegisteringEngine
from kvoffload.errors import NativeError
from kvoffload.kvspec import build_page_map
from kvoffload.transfer import CopyEngine, HostEngine, open_engine
from kvoffload.transfer.cuda_engine import CudaEngine, HostRegistration
from tests.kit.connector.local_client import MEMORY, LocalClient, LocalPlaces
from tests.kit.connector.workers import (
    Move,
    TestedWorker,
    identify,
    load,
    make_cache,
    make_worker,
    save,
)
from tests.kit.kvspec.builders import dense
from tests.kit.transfer.fake_cuda import FakeCuda, needs_fake_cuda
from tests.kit.transfer.stand_ins import PassingEngine

SEGMENT = MEMORY.segment_bytes
TIMEOUT_S = 60.0


class NotingEngine(PassingEngine):
    """Notes what it is told of memory, and registers it when the test says so."""

    def __init__(self, inner: CopyEngine) -> None:
        super().__init__(inner)
        self.ranges: list[tuple[int, int]] = []
        self.starts: list[tuple[int, float]] = []
        self.looks = 0
        self.is_done = True
        self.is_leaving = False
        self.problem = ""
        self.registered: int | None = None
        """Bytes registered so far, while registration is not done."""
        self.tellers: set[int] = set()
        """Threads that told of memory."""

    @property
    def registration(self) -> HostRegistration:
        self.looks += 1
        asked = sum(size_bytes for _, size_bytes in self.ranges)
        return HostRegistration(
            asked_bytes=asked,
            registered_bytes=asked if self.is_done else self.registered or 0,
            is_done=self.is_done,
            is_leaving=self.is_leaving,
            problem=self.problem,
        )

    def add_host_range(self, address: int, size_bytes: int) -> None:
        self.tellers.add(threading.get_ident())
        self.ranges.append((address, size_bytes))

    def remove_host_range(self, address: int, size_bytes: int) -> None:
        self.tellers.add(threading.get_ident())
        self.ranges.remove((address, size_bytes))
        self.is_leaving = True

    def wait_registered(self, size_bytes: int, timeout_s: float) -> None:
        self.starts.append((size_bytes, timeout_s))


def await_that(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def is_looking() -> bool:
    return any(thread.name == "kvoffload-host-memory" for thread in threading.enumerate())


def make_places() -> LocalPlaces:
    worker = make_worker()
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    worker.unregister()
    return worker.shared.opened[0]


def make_memory() -> tuple[HostMemory, NotingEngine, LocalPlaces]:
    places = make_places()
    engine = NotingEngine(open_engine(build_page_map(dense()), {"kv": 1 << 40}))
    return HostMemory(engine, places, clock=lambda: 5.0), engine, places


def ranges_of(client: LocalClient) -> list[tuple[int, int]]:
    return client.memory(client.memory_id).ranges()


def test_the_memory_of_another_client_takes_the_formers_place() -> None:
    """Both have the same memory of one server, which lies elsewhere for each."""

    class OtherPlaces(LocalPlaces):
        def places(self) -> tuple[tuple[int, int], ...]:
            return places.places()

        def memory(self, memory_id: int) -> SegmentMap:
            assert memory_id == places.client.memory_id
            return super().memory(self.client.memory_id)

    memory, engine, places = make_memory()
    memory.update(places.places())
    assert engine.ranges == ranges_of(places.client)
    other = OtherPlaces(make_places().client)
    memory.follow(other)
    memory.update(other.places())
    assert engine.ranges == ranges_of(other.client)


def test_memory_is_registered_in_order_as_it_becomes_ready() -> None:
    memory, engine, places = make_memory()
    ranges = ranges_of(places.client)
    assert len(ranges) == 2
    for ready, told in ((0, 0), (SEGMENT - 1, 0), (SEGMENT, 1), (2 * SEGMENT - 4096, 1), (2 * SEGMENT, 2)):
        places.ready = ready
        memory.update(places.places())
        memory.update(places.places())
        assert engine.ranges == ranges[:told]


def test_a_look_asks_the_driver_nothing_once_all_is_registered() -> None:
    memory, engine, places = make_memory()
    memory.update(places.places())
    looks = engine.looks
    assert looks > 0
    for _ in range(10):
        memory.update(places.places())
    assert engine.looks == looks


def test_memory_that_a_server_gives_back_is_unregistered_before_its_mark_goes() -> None:
    memory, engine, places = make_memory()
    ranges = ranges_of(places.client)
    memory.update(places.places())
    assert places.pinned == {0, 1}
    places.ready = SEGMENT
    memory.update(places.places())
    assert engine.ranges == ranges[:1]
    assert places.pinned == {0, 1}  # copies that began before may go on
    # A segment that is there again meanwhile is registered when the driver has let go of it.
    places.ready = 2 * SEGMENT
    memory.update(places.places())
    assert engine.ranges == ranges[:1]
    engine.is_leaving = False
    memory.update(places.places())
    assert places.pinned == {0}
    memory.update(places.places())
    assert engine.ranges == ranges
    assert places.pinned == {0, 1}


def test_memory_that_is_given_back_while_it_is_marked_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, engine, places = make_memory()
    mark = places.mark_pinned

    def mark_too_late(memory_id: int, segment: int, is_pinned: bool) -> None:
        mark(memory_id, segment, is_pinned)
        places.ready = SEGMENT

    monkeypatch.setattr(places, "mark_pinned", mark_too_late)
    memory.update(places.places())
    assert engine.ranges == ranges_of(places.client)[:1]
    assert places.pinned == {0}


def test_a_new_servers_memory_follows_and_a_retired_one_goes() -> None:
    memory, engine, places = make_memory()
    memory.update(places.places())
    former = ranges_of(places.client)
    first = places.client.memory_id
    places.client.serve_anew()
    memory.update(places.places())
    assert engine.ranges == former + ranges_of(places.client)
    places.retire(first)
    memory.update(places.places())
    assert engine.ranges == ranges_of(places.client)


def test_a_former_memory_stays_mapped_until_it_has_left() -> None:
    memory, engine, places = make_memory()
    memory.update(places.places())
    client, first = places.client, places.client.memory_id
    client.serve_anew()
    segments = weakref.ref(client.memory(first))
    places.retire(first)
    memory.update(places.places())
    del client.sessions[first]
    gc.collect()
    memory.update(places.places())
    assert segments() is not None
    engine.is_leaving = False
    memory.update(places.places())
    gc.collect()
    assert segments() is None


def test_progress_and_what_goes_wrong_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvoffload.connector.engine.host_memory")
    memory, engine, places = make_memory()
    engine.is_done = False
    for _ in range(3):
        memory.update(places.places())
    assert [record.getMessage() for record in caplog.records] == [
        f"memory {places.client.memory_id} is being registered with the driver"
    ]
    engine.is_done, engine.problem = True, "cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY; look at dmesg"
    for _ in range(3):
        memory.update(places.places())
    assert [(record.levelname, record.getMessage()) for record in caplog.records[1:]] == [
        ("DEBUG", "4MiB of 4MiB are registered with the driver, after 0.0 s"),
        ("WARNING", f"blocks in part of the cache's memory are copied more slowly: {engine.problem}"),
    ]


def test_progress_is_logged_at_each_tenth(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "kvoffload.connector.engine.host_memory")
    memory, engine, places = make_memory()
    engine.is_done = False
    for registered in (0, 1 << 20, 1 << 20, 3 << 20):
        engine.registered = registered
        memory.update(places.places())
    assert [record.getMessage() for record in caplog.records[1:]] == [
        "1MiB of 4MiB are registered with the driver",
        "3MiB of 4MiB are registered with the driver",
    ]


# ---- in a worker ----


@pytest.fixture
def noting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NotingEngine]]:
    opened: list[NotingEngine] = []

    def open_noting(*given: object, **named: object) -> NotingEngine:
        opened.append(NotingEngine(open_engine(*given, **named)))  # type: ignore[arg-type]
        return opened[-1]

    monkeypatch.setattr(worker_side, "open_engine", open_noting)
    yield opened
    for engine in opened:
        engine.inner.close()


def start_worker() -> TestedWorker:
    worker = make_worker()
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    return worker


def test_registration_begins_when_the_worker_joins_and_the_start_waits_within_a_bound(
    noting: list[NotingEngine],
) -> None:
    worker = start_worker()
    await_that(lambda: noting[0].ranges == ranges_of(worker.shared.client))
    assert all(size_bytes == SEGMENT and 0 <= wait_s <= START_WAIT_S for size_bytes, wait_s in noting[0].starts)
    worker.close()


def test_the_start_waits_for_the_first_segment(noting: list[NotingEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvoffload.connector.engine.host_memory.START_WAIT_S", TIMEOUT_S)
    worker = start_worker()
    ((size_bytes, wait_s),) = noting[0].starts
    assert size_bytes == SEGMENT
    assert 0 < wait_s <= TIMEOUT_S
    worker.close()


def test_a_start_without_a_ready_segment_does_not_wait(
    noting: list[NotingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalPlaces, "ready_bytes", lambda places, memory_id: 0)
    worker = start_worker()
    assert (noting[0].ranges, noting[0].starts) == ([], [])
    save(worker, Move(1, 1, 0))  # by way of the buffer
    worker.close()


def test_what_becomes_ready_is_registered_while_the_engine_has_nothing_to_do(
    noting: list[NotingEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(LocalPlaces, "ready_bytes", lambda places, memory_id: 0)
        worker = start_worker()
    await_that(lambda: noting[0].ranges == ranges_of(worker.shared.client))
    worker.close()


def test_a_memory_follows_a_step_that_met_it_and_goes_when_it_is_retired(noting: list[NotingEngine]) -> None:
    worker = start_worker()
    client = worker.shared.client
    former = ranges_of(client)
    await_that(lambda: noting[0].ranges == former)
    client.serve_anew()
    worker.take_results(is_idle=False)
    await_that(lambda: noting[0].ranges == former + ranges_of(client))
    (first, *_) = client.sessions
    worker.submit(StepPlan(retired=(first,)))
    worker.take_results(is_idle=False)
    await_that(lambda: noting[0].ranges == ranges_of(client))
    worker.close()


def test_no_step_tells_the_driver_of_memory(noting: list[NotingEngine]) -> None:
    worker = start_worker()
    client = worker.shared.client
    for _ in range(3):
        (former, *_) = client.sessions
        client.serve_anew()
        worker.take_results(is_idle=False)
        worker.submit(StepPlan(retired=(former,)))
        worker.take_results(is_idle=True)
        del client.sessions[former]
        await_that(lambda: noting[0].ranges == ranges_of(client))
    worker.close()
    assert len(noting[0].tellers) == 1
    assert threading.get_ident() not in noting[0].tellers


def test_a_cache_that_is_registered_anew_knows_all_memory_again(noting: list[NotingEngine]) -> None:
    worker = start_worker()
    worker.unregister()
    assert not is_looking()
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    await_that(lambda: noting[1].ranges == ranges_of(worker.shared.client))
    worker.close()
    assert not is_looking()


def test_a_stage_of_a_pipeline_registers_at_once(noting: list[NotingEngine]) -> None:
    worker = make_worker(pipeline_ranks=2, exchange=lambda frame: [frame, frame])
    geometry, tensors = make_cache()
    worker.register(geometry, tensors, scale_views={}, identify=identify)
    await_that(lambda: noting[0].ranges == ranges_of(worker.shared.client))
    worker.close()


def test_an_engine_that_takes_no_memory_costs_no_result_and_is_asked_again(
    noting: list[NotingEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[int] = []

    def refuse(engine: NotingEngine, address: int, size_bytes: int) -> None:
        asked.append(address)
        raise NativeError("host memory was not taken: the copy engine is closed")

    with monkeypatch.context() as patch:
        patch.setattr(NotingEngine, "add_host_range", refuse)
        worker = start_worker()
        save(worker, Move(1, 1, 0))
        assert load(worker, Move(1, 2, 0))
        await_that(lambda: len(asked) > 2)
    await_that(lambda: noting[0].ranges == ranges_of(worker.shared.client))
    worker.close()
    assert caplog.text.count("the cache's memory is not registered") == 1


def test_a_fault_of_ours_ends_registration_and_nothing_else(
    noting: list[NotingEngine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(engine: NotingEngine, address: int, size_bytes: int) -> None:
        raise ZeroDivisionError("of the test")

    monkeypatch.setattr(NotingEngine, "add_host_range", fail)
    worker = start_worker()
    await_that(lambda: not is_looking())
    save(worker, Move(1, 1, 0))
    assert load(worker, Move(1, 2, 0))
    worker.close()
    assert caplog.text.count("no more of the cache's memory is registered") == 1
    assert "of the test" in caplog.text


# ---- on the driver made for tests ----


@needs_fake_cuda
def test_the_gpus_engine_wants_to_be_told_and_the_hosts_does_not() -> None:
    driver, page_map = FakeCuda(), build_page_map(dense())
    memory = {one.name: driver.allocate(one.size_bytes) for one in page_map.allocations}
    with CudaEngine(page_map, memory, device=0, library=driver.library) as engine:
        assert isinstance(engine, RegisteringEngine)
    with HostEngine(page_map, {"kv": 1 << 40}) as host:
        assert not isinstance(host, RegisteringEngine)


@needs_fake_cuda
def test_nothing_of_a_retired_memory_stays_registered() -> None:
    driver, places = FakeCuda(), make_places()
    page_map = build_page_map(dense())
    device_memory = {one.name: driver.allocate(one.size_bytes) for one in page_map.allocations}
    engine = CudaEngine(page_map, device_memory, device=0, library=driver.library)
    memory = HostMemory(engine, places)
    memory.update(places.places())
    memory.wait_for_first()
    assert engine.registration.registered_bytes >= SEGMENT
    engine.wait_registered(2 * SEGMENT, TIMEOUT_S)
    first = places.client.memory_id
    places.client.serve_anew()
    memory.update(places.places())
    engine.wait_registered(4 * SEGMENT, TIMEOUT_S)
    assert driver.registrations == 4
    places.retire(first)
    while driver.registrations > 2:
        memory.update(places.places())
    assert engine.registration.registered_bytes == engine.registration.asked_bytes == 2 * SEGMENT
    engine.close(TIMEOUT_S)
    assert (driver.registrations, driver.report_count) == (0, 0)

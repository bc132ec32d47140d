"""The host engine: the bytes of the plain copy, in the background, and nothing held after close."""

from __future__ import annotations

import os
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import native
from kvoffload.errors import NativeError, RegistrationError, StorageError, UnsupportedError
from kvoffload.kvspec import LAYOUTS, KVGeometry, PageMap, Registration, build_page_map
from kvoffload.transfer import CopyDirection, CopyItems, FinishedCopy, HostEngine
from tests.kit.kvspec.builders import allocate, dense, in_layout, qwen3next
from tests.kit.kvspec.strategies import at_least, geometries
from tests.kit.processors import ALL_CPUS, bound_to, needs_two_cpus, thread_cpus
from tests.kit.transfer.memory import new_records, random_memory
from tests.kit.transfer.plain_copy import PlainCopy

TIMEOUT_S = 60.0


def items_of(group: int, blocks: list[int], records: torch.Tensor) -> CopyItems:
    """Block `blocks[i]` with row i of `records`."""
    rows = np.arange(len(blocks), dtype=np.uint64) * np.uint64(records.stride(0) if len(blocks) else 0)
    return CopyItems(
        group=np.full(len(blocks), group), block=np.array(blocks, np.int64), slot=np.uint64(records.data_ptr()) + rows
    )


def run(engine: HostEngine, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False) -> FinishedCopy:
    ticket = engine.submit(direction, items, has_digests=has_digests)
    assert engine.fence(TIMEOUT_S)
    (finished,) = engine.poll()
    assert finished.ticket == ticket
    assert finished.fault == ""
    return finished


def assert_equals_plain_copy(page_map: PageMap, geometry: KVGeometry, group: int, blocks: list[int]) -> None:
    """Both engines do the same to the same bytes, wherever blocks go and come from."""
    ours, theirs = random_memory(geometry), random_memory(geometry)
    saved, expected = new_records(page_map, group, len(blocks)), new_records(page_map, group, len(blocks))
    plain = PlainCopy(page_map, theirs)
    with HostEngine(page_map, ours, threads=2) as engine:
        finished = run(engine, CopyDirection.SAVE, items_of(group, blocks, saved), has_digests=True)
        plain.save(group, blocks, expected)
        assert torch.equal(saved, expected)
        assert_digests(finished, saved, group)

        for memory in (ours, theirs):
            for flat in memory.values():
                torch.bitwise_not(flat, out=flat)
        backwards = blocks[::-1]
        run(engine, CopyDirection.LOAD, items_of(group, backwards, saved))
        plain.load(group, backwards, expected)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def assert_digests(finished: FinishedCopy, records: torch.Tensor, group: int) -> None:
    if len(records) == 0:
        assert finished.digests is None
        return
    assert finished.digests is not None
    name = {"fingerprint": bytes(range(32)), "group": group, "shard": 1}
    hashes = [bytes([index % 256] * 32) for index in range(len(records))]
    batch = native.finish_digests(
        finished.digests.data,
        records.shape[1],
        block_hashes=b"".join(hashes),
        **name,  # type: ignore[arg-type]
    )
    assert np.frombuffer(batch, np.uint64).tolist() == [
        native.digest_record(row.numpy().data, block_hash=block_hash, **name)  # type: ignore[arg-type]
        for row, block_hash in zip(records, hashes, strict=True)
    ]


@given(geometry=geometries(), data=st.data())
@at_least(150)
def test_equals_the_plain_copy_on_random_geometries(geometry: KVGeometry, data: st.DataObject) -> None:
    page_map = build_page_map(geometry)
    group = data.draw(st.integers(0, len(geometry.groups) - 1))
    blocks = data.draw(st.lists(st.integers(0, geometry.num_blocks - 1), unique=True))
    assert_equals_plain_copy(page_map, geometry, group, blocks)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_equals_the_plain_copy_in_every_layout(layout: str) -> None:
    geometry = in_layout(layout, num_layers=3, num_blocks=6)
    assert_equals_plain_copy(build_page_map(geometry), geometry, 0, [4, 0, 1, 5])


@pytest.mark.parametrize("group", range(4))
def test_equals_the_plain_copy_on_a_hybrid_model(group: int) -> None:
    geometry = qwen3next(5)
    assert_equals_plain_copy(build_page_map(geometry), geometry, group, [4, 1, 2])


def test_plans_that_share_blocks_keep_their_order() -> None:
    geometry = dense(4)
    page_map = build_page_map(geometry)
    memory = random_memory(geometry)
    before = memory["kv"].clone()
    records = new_records(page_map, 0, 4)
    with HostEngine(page_map, memory, threads=2) as engine:
        for source, target in [(0, 1), (1, 2), (2, 3)] * 30:
            engine.submit(CopyDirection.SAVE, items_of(0, [source], records[source:]))
            engine.submit(CopyDirection.LOAD, items_of(0, [target], records[source:]))
        assert engine.fence(TIMEOUT_S)
    expected = new_records(page_map, 0, 4)
    PlainCopy(page_map, {"kv": before}).save(0, [0] * 4, expected)
    PlainCopy(page_map, memory).save(0, range(4), records)
    assert torch.equal(records, expected)


def test_memory_may_be_an_address() -> None:
    geometry = dense(3)
    page_map = build_page_map(geometry)
    memory = random_memory(geometry)
    records = new_records(page_map, 0, 1)
    with HostEngine(page_map, {"kv": memory["kv"].data_ptr()}) as engine:
        run(engine, CopyDirection.SAVE, items_of(0, [1], records))
    assert records[0, :64].tolist() == memory["kv"][64:128].tolist()


def test_memory_must_be_in_reach() -> None:
    page_map = build_page_map(dense(2))
    with pytest.raises(StorageError, match="the host engine cannot reach"):
        HostEngine(page_map, {"kv": torch.empty(256, dtype=torch.uint8, device="meta")})
    with pytest.raises(RegistrationError, match="allocation kv is not registered"):
        HostEngine(page_map, {})
    with pytest.raises(UnsupportedError, match="at most 1024 threads"):
        HostEngine(page_map, random_memory(dense(2)), threads=5000)


def test_memory_is_held_until_close_and_not_longer() -> None:
    geometry = dense(2)
    page_map = build_page_map(geometry)
    memory = random_memory(geometry)
    flat = weakref.ref(memory["kv"])
    engine = HostEngine(page_map, memory)
    memory.clear()
    assert flat() is not None
    records = new_records(page_map, 0, 1)
    engine.submit(CopyDirection.SAVE, items_of(0, [1], records))
    assert engine.fence(TIMEOUT_S)
    engine.close()
    assert flat() is None
    assert [finished.fault for finished in engine.poll()] == [""]
    with pytest.raises(NativeError, match="the copy engine is closed"):
        engine.submit(CopyDirection.SAVE, items_of(0, [1], records))
    engine.close()


def test_a_forgotten_engine_lets_go_too() -> None:
    geometry = dense(2)
    memory = random_memory(geometry)
    flat = weakref.ref(memory["kv"])
    engine = HostEngine(build_page_map(geometry), memory)
    memory.clear()
    engine.submit(CopyDirection.SAVE, CopyItems(group=np.zeros(0), block=np.zeros(0), slot=np.zeros(0)))
    del engine
    assert flat() is None


def test_a_registration_closes_it() -> None:
    geometry = dense(3)
    tensors = allocate(geometry)
    registration = Registration()
    registration.register(geometry, tensors.views)
    registration.attach(HostEngine(registration.page_map, registration.memory))
    assert registration.unregister() == ()


def test_many_threads_submit_and_all_is_told() -> None:
    geometry = dense(8)
    page_map = build_page_map(geometry)
    memory = random_memory(geometry)
    records = new_records(page_map, 0, 8)
    with HostEngine(page_map, memory, threads=2) as engine:

        def submit(block: int) -> None:
            for _ in range(20):
                engine.submit(CopyDirection.SAVE, items_of(0, [block], records[block:]))

        threads = [threading.Thread(target=submit, args=(block,)) for block in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert engine.fence(TIMEOUT_S)
        assert sorted(finished.ticket for finished in engine.poll()) == list(range(1, 161))
    expected = new_records(page_map, 0, 8)
    PlainCopy(page_map, memory).save(0, range(8), expected)
    assert torch.equal(records, expected)


def test_a_forked_child_is_told_whose_engine_it_is() -> None:
    geometry = dense(2)
    with HostEngine(build_page_map(geometry), random_memory(geometry)) as engine:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                engine.close()
                engine.fence(0)
            except NativeError as fault:
                code = 0 if "this is a child of it" in str(fault) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert engine.fence(TIMEOUT_S)


@needs_two_cpus
def test_copies_run_on_all_processors_of_the_engine_although_the_thread_that_opens_it_is_bound() -> None:
    """The main thread of a vLLM worker on CPUs is bound to one processor and spins there while it is idle."""
    page_map = build_page_map(dense(2))
    with bound_to({min(ALL_CPUS)}), HostEngine(page_map, random_memory(dense(2)), threads=2):
        while len(cpus := thread_cpus("kvoffload-copy")) < 2:
            time.sleep(0.001)  # a thread has its name when it runs
        assert list(cpus.values()) == [ALL_CPUS, ALL_CPUS]

"""The class that SGLang loads, derived from classes of the form of SGLang's own."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvoffload.sglang import plugin, start_up
from kvoffload.sglang.pools import describe_pool
from kvoffload.sglang.weights import WeightMask
from tests.kit.sglang.linked import link, make_keys
from tests.kit.sglang.pools import PAGE, MHATokenToKVPool, clear, copy_rows, fill, rows_of
from tests.kit.sglang.updater import make_updater_class

KEYS = make_keys(2)


class PoolName(Enum):
    """The names that SGLang gives pools."""

    KV = "kv"
    SWA = "swa"


class Base:
    """A stand-in for UnifiedCacheLinker."""


class Counter:
    """A stand-in for LayerWiseLoadCounter."""

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.producer_index = -1
        self.futures: dict[int, list[Future[None]]] = {}

    def update_producer(self) -> int:
        self.producer_index += 1
        self.futures[self.producer_index] = [Future() for _ in range(self.num_layers)]
        return self.producer_index

    def complete(self, index: int, layer: int) -> None:
        self.futures[index][layer].set_result(None)

    def fail(self, index: int, error: BaseException) -> None:
        for future in self.futures[index]:
            future.set_exception(error)

    def finish(self, index: int) -> bool:
        return all(future.exception(timeout=0) is None for future in self.futures.pop(index, []))

    def reset(self) -> None:
        self.producer_index = -1
        self.futures.clear()


def transfer(keys: list[str], *pages: int, name: PoolName = PoolName.KV) -> list[Any]:
    return [SimpleNamespace(name=name, keys=keys, device_indices=torch.tensor(rows_of(*pages)))]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    return make(monkeypatch)


def make(monkeypatch: pytest.MonkeyPatch, model: torch.nn.Module | None = None, **settings: Any) -> Any:
    pool = MHATokenToKVPool()
    fill(pool, 1)
    linked = link(pool, **settings)
    model = model or torch.nn.Linear(2, 2)
    weights = WeightMask(lambda: [model])
    weights.take()
    pages = describe_pool(pool, page_size=PAGE)
    monkeypatch.setattr(start_up, "start_linker", lambda *_, **__: (linked.linker, weights, pages))
    kind = plugin.derive_linker(Base, Counter, version="0", pool_name=PoolName)
    linker = kind(None, None, components=set(), extra_config={}, forward_stream=None)
    return SimpleNamespace(linker=linker, pool=pool, linked=linked, model=model, weights=weights)


def save(made: Any) -> None:
    assert made.linker.offload(transfer(KEYS, 1, 2))
    while not made.linker.num_completed_offloads():
        pass
    assert made.linker.pop_completed_offload()


def test_a_hit_goes_through_all_hooks(made: Any) -> None:
    save(made)
    saved = copy_rows(made.pool, rows_of(1, 2))
    clear(made.pool)
    assert made.linker.lookup("r", transfer(KEYS)) == [1, 2]
    assert made.linker.load("r", transfer(KEYS, 4, 5))
    index = made.linker.start_layer_wise_loading()
    assert index == 0
    assert made.linker.finish_layer_wise_loading(index)
    assert all(torch.equal(*both) for both in zip(copy_rows(made.pool, rows_of(4, 5)), saved, strict=True))
    assert made.linker.start_layer_wise_loading() == -1
    assert made.linked.cache.steps > 0
    assert made.linker.pools.keys() == {PoolName.KV}


def test_a_load_that_failed_on_one_of_several_ranks_is_told_after_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(monkeypatch, ranks=2)
    save(made)
    assert made.linker.load("r", transfer(KEYS, 4, 5))
    index = made.linker.start_layer_wise_loading()
    assert not made.linker.finish_layer_wise_loading(index)


def test_a_load_that_nobody_waits_for_any_more_is_taken_back(made: Any) -> None:
    save(made)
    made.linker.lookup("r", transfer(KEYS))
    made.linker.load("r", transfer(KEYS, 4, 5))
    assert made.linker.cancel_queued_load("r")
    assert not made.linker.cancel_queued_load("r")
    assert made.linker.start_layer_wise_loading() == -1


def test_a_fault_of_ours_is_a_miss_and_is_told(made: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert made.linker.lookup("r", transfer(KEYS, name=PoolName.SWA)) == []
    assert "lookup failed: pool" in caplog.text


def test_a_reset_under_weights_that_nobody_knows_begins_a_new_generation(made: Any) -> None:
    save(made)
    made.linker.reset()
    assert made.linker.lookup("r", transfer(KEYS)) == []
    made.linker.close()
    assert made.linked.cache.is_closed


def test_weights_that_change_without_a_word_end_saves_and_hits(made: Any) -> None:
    save(made)
    with torch.no_grad():
        made.model.weight += 1
    assert made.linker.lookup("r", transfer(KEYS)) == []
    assert made.linked.linker.is_distrusted


@pytest.mark.parametrize("is_flushed", [False, True])
def test_an_update_of_a_single_weight_ends_saves_and_hits_until_the_cache_is_empty(
    monkeypatch: pytest.MonkeyPatch, is_flushed: bool
) -> None:
    model = torch.nn.Linear(256, 256)
    made = make(monkeypatch, model=model)
    made.linker.reset()
    save(made)
    made.weights.updates.note()
    with torch.no_grad():
        model.weight[3, 5] += 1
    if is_flushed:
        made.linker.reset()
    assert made.linker.lookup("r", transfer(KEYS)) == []
    assert made.linked.linker.is_distrusted != is_flushed
    made.linker.reset()
    save(made)
    assert made.linker.lookup("r", transfer(KEYS)) == [1, 2]


def test_an_update_that_changed_nothing_ends_nothing(made: Any) -> None:
    made.linker.reset()
    save(made)
    made.weights.updates.note()
    assert made.linker.lookup("r", transfer(KEYS)) == [1, 2]


def test_while_weights_may_be_written_to_nothing_is_saved_or_found(made: Any) -> None:
    made.linker.reset()
    save(made)
    updater = make_updater_class()()
    updater.begin_weight_update(None)
    made.weights.updates.note(updater)
    assert made.linker.lookup("r", transfer(KEYS)) == []
    made.linker.reset()
    assert made.linker.lookup("r", transfer(KEYS)) == []
    updater.end_weight_update(None)
    made.linker.reset()
    assert made.linker.lookup("r", transfer(KEYS)) == [1, 2]


def test_the_module_imports_nothing_of_an_engine_until_it_is_asked() -> None:
    script = "import kvoffload.sglang.plugin, sys; print(*({'torch', 'sglang', 'vllm', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
    with pytest.raises(AttributeError, match="OtherLinker"):
        _ = plugin.OtherLinker

"""The mini engine: what it restores through kvspec is what it computed, bit for bit, in every shape of KV memory."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from ctypes import c_uint8
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from mini_engine import offload
from mini_engine.engine import Engine, Request
from mini_engine.kv_cache import LAYOUTS, CacheConfig
from mini_engine.model import FULL, LAYER_SETS, LINEAR, WINDOW, ModelConfig
from mini_engine.offload import BlockStore, Move
from torch.multiprocessing.reductions import StorageWeakRef

import kvoffload
from kvoffload.errors import GeometryError, RegistrationError, SelfTestError
from kvoffload.kvspec import LayerKind
from kvoffload.transfer import CopyDirection, CopyItems, open_engine
from tests.examples.serve import (
    EXAMPLES,
    NEW_TOKENS,
    QUANTS,
    assert_equal,
    assert_restores,
    is_equal,
    serve_cold,
    serve_fresh,
    serve_restored,
)
from tests.kit.transfer.stand_ins import PassingEngine

SPLITTABLE = [layout for layout in LAYOUTS if not layout.startswith("BL") or layout.startswith("BLOCK_")]

missing_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch finds no CUDA device")


@cache
def cold_reference(quant: str, blocks: int) -> Request:
    """Returns what every layout has to compute."""
    return serve_cold(ModelConfig(), CacheConfig(quant=quant, blocks=blocks)).cold


# ---- restored equals cold


@pytest.mark.parametrize("is_overlaid", [False, True], ids=["beside", "overlaid"])
@pytest.mark.parametrize("blocks", [2, 3, 64])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restored_equals_cold(layout: str, quant: str, blocks: int, is_overlaid: bool) -> None:
    config = CacheConfig(layout=layout, quant=quant, blocks=blocks, is_overlaid=is_overlaid)
    cold = assert_restores(ModelConfig(), config)
    assert_equal(cold, cold_reference(quant, blocks))


@pytest.mark.parametrize("is_overlaid", [False, True], ids=["beside", "overlaid"])
@pytest.mark.parametrize("blocks", [2, 64])
@pytest.mark.parametrize("layout", ["KV_BLOCK_NHD", "LHBNC", "BLHNC"])
@pytest.mark.parametrize("layers", ["full", "window"])
def test_restored_equals_cold_without_recurrent_layers(
    layers: str, layout: str, blocks: int, is_overlaid: bool
) -> None:
    config = CacheConfig(layout=layout, quant=QUANTS[1], blocks=blocks, is_overlaid=is_overlaid)
    assert_restores(ModelConfig(layers=LAYER_SETS[layers]), config)


@pytest.mark.parametrize("kernel_split", [2, 4, 8])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("layout", SPLITTABLE)
def test_kernel_blocks_smaller_than_blocks(layout: str, quant: str, kernel_split: int) -> None:
    config = CacheConfig(layout=layout, quant=quant, blocks=2, kernel_split=kernel_split)
    assert_equal(assert_restores(ModelConfig(), config), cold_reference(quant, 2))


@pytest.mark.parametrize("is_overlaid", [False, True], ids=["beside", "overlaid"])
@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layers_of_one_group_have_different_page_sizes(layout: str, quant: str, is_overlaid: bool) -> None:
    model = ModelConfig(kv_heads=(1, 4))
    config = CacheConfig(layout=layout, quant=quant, blocks=2, is_overlaid=is_overlaid)
    assert_restores(model, config)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_of_everything(layout: str) -> None:
    """Two blocks of two tokens and two heads: no shape tells which dimension is which."""
    config = CacheConfig(blocks=2, block_tokens=2, state_block_tokens=2, layout=layout)
    engine = Engine(ModelConfig(), config, torch.device("cpu"), BlockStore())
    assert {2} <= set(engine.cache.tensors["1.full_attention"].shape) <= {2, 8, 16}
    cold = engine.run([3, 1, 2], max_tokens=2)
    engine.scrub()
    restored = engine.run([3, 1, 2], max_tokens=2)
    assert restored.reused == 2
    assert_equal(cold, restored)


@pytest.mark.parametrize("is_overlaid", [False, True], ids=["beside", "overlaid"])
def test_groups_with_different_block_sizes_restore_at_a_common_boundary(is_overlaid: bool) -> None:
    """A state every 16 tokens, attention blocks of 8: 36 tokens have a state at 32, 28 have one at 16 only."""
    config = CacheConfig(state_block_tokens=16, is_overlaid=is_overlaid)
    served = serve_cold(ModelConfig(), config)
    restored = serve_restored(served)
    assert (len(served.prompt), restored.reused) == (36, 32)
    assert_equal(served.cold, restored)
    served.engine.scrub()
    shorter = served.engine.run(served.prompt[:28], NEW_TOKENS)
    assert shorter.reused == 16
    assert_equal(shorter, serve_fresh(served.prompt[:28], config))


@pytest.mark.parametrize("quant", QUANTS)
def test_the_engines_own_prefix_hit_equals_the_restored_one(quant: str) -> None:
    served = serve_cold(ModelConfig(), CacheConfig(quant=quant))
    local = served.engine.run(served.prompt, NEW_TOKENS)
    restored = serve_restored(served)
    assert (local.restored_blocks, restored.restored_blocks > 0) == (0, True)
    assert local.reused == restored.reused == 32
    assert_equal(local, restored)
    assert_equal(local, served.cold)


def test_blocks_of_the_engine_and_of_the_store_make_one_prefix() -> None:
    served = serve_cold(ModelConfig(), CacheConfig())
    served.engine.scrub()
    served.engine.run(served.prompt[:12], NEW_TOKENS)
    mixed = served.engine.run(served.prompt, NEW_TOKENS)
    needed = sum(map(len, served.engine.needed_blocks(32)))
    assert (mixed.reused, 0 < mixed.restored_blocks < needed) == (32, True)
    assert_equal(mixed, served.cold)


def test_a_prefix_of_another_prompt_is_restored() -> None:
    served = serve_cold(ModelConfig(), CacheConfig())
    prompt = [*served.prompt[:20], 1, 2, 3, 4, 5, 6, 7]
    served.engine.scrub()
    answer = served.engine.run(prompt, NEW_TOKENS)
    assert answer.reused == 16
    assert_equal(answer, serve_fresh(prompt, CacheConfig()))


# ---- what must be noticed


@pytest.mark.parametrize("is_overlaid", [False, True], ids=["beside", "overlaid"])
@pytest.mark.parametrize("kind", [LINEAR, FULL, WINDOW])
@pytest.mark.parametrize("quant", QUANTS)
def test_zeroed_blocks_of_one_group_are_noticed(quant: str, kind: LayerKind, is_overlaid: bool) -> None:
    served = serve_cold(ModelConfig(), CacheConfig(quant=quant, blocks=3, is_overlaid=is_overlaid))
    damaged = [group.name for group in served.engine.cache.groups].index(kind)
    served.store.records = {key: record * (key.group != damaged) for key, record in served.store.records.items()}
    assert not is_equal(served.cold, serve_restored(served))


def test_zeroed_scales_alone_are_noticed() -> None:
    """Saved pages without their scales (vLLM #39224's kind of fault) would look whole."""
    served = serve_cold(ModelConfig(), CacheConfig(quant=QUANTS[1], blocks=2))
    for key, record in served.store.records.items():
        pages = served.store.registration.page_map.groups[key.group]
        for part in pages.parts:
            if part.part == "scales":
                record[part.offset : part.offset + part.length] = 0
    assert not is_equal(served.cold, serve_restored(served))


def test_without_the_store_nothing_survives_a_scrub() -> None:
    served = serve_cold(ModelConfig(), CacheConfig(blocks=2))
    served.store.records.clear()
    again = serve_restored(served)
    assert again.reused == 0
    assert_equal(served.cold, again)


def test_a_copy_path_that_forgets_a_byte_is_refused_at_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    class BendingEngine(PassingEngine):
        """Loads another byte than was saved."""

        def submit(self, direction: CopyDirection, items: CopyItems, **settings: Any) -> int:
            if direction is CopyDirection.LOAD:
                c_uint8.from_address(int(items.slot[0])).value ^= 1
            return super().submit(direction, items, **settings)

    monkeypatch.setattr(offload, "open_engine", lambda *given: BendingEngine(open_engine(*given)))
    with pytest.raises(SelfTestError, match="group recurrent"):
        Engine(ModelConfig(), CacheConfig(), torch.device("cpu"), BlockStore())


def test_a_forgotten_scale_tensor_is_refused() -> None:
    served = serve_cold(ModelConfig(), CacheConfig(quant=QUANTS[1], blocks=2))
    served.store.unregister()
    served.engine.cache.scale_views.popitem()
    with pytest.raises(RegistrationError, match="was not given"):
        served.store.register(served.engine.cache)


@pytest.mark.parametrize("config", [{"is_overlaid": True}, {"layout": "BLNHC"}], ids=str)
def test_kernel_blocks_that_would_not_lie_at_one_stride_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(GeometryError, match="kernel blocks"):
        serve_cold(ModelConfig(), CacheConfig(kernel_split=2, **config))  # type: ignore[arg-type]


# ---- the life of a registration


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("is_overlaid", [False, True], ids=["beside", "overlaid"])
def test_sleep_frees_the_memory_and_wake_restores_from_the_store(is_overlaid: bool, quant: str) -> None:
    served = serve_cold(ModelConfig(), CacheConfig(quant=quant, blocks=3, is_overlaid=is_overlaid))
    for _ in range(2):
        cache = served.engine.cache
        tensors = [*cache.allocations.values(), *cache.tensors.values(), *cache.scale_views.values()]
        tensors += served.store.registration.memory.values()
        views = [weakref.ref(tensor) for tensor in tensors]
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in cache.allocations.values()]
        del cache, tensors
        served.engine.sleep()
        assert [view() for view in views] == [None] * len(views)
        assert all(storage.expired() for storage in storages)
        served.engine.wake()
        restored = serve_restored(served)
        assert restored.reused == 16
        assert_equal(served.cold, restored)


def test_a_restarted_engine_with_more_blocks_uses_the_records() -> None:
    served = serve_cold(ModelConfig(), CacheConfig(blocks=5))
    served.engine.sleep()
    engine = Engine(ModelConfig(), CacheConfig(blocks=9), torch.device("cpu"), served.store)
    restored = engine.run(served.prompt, NEW_TOKENS)
    assert restored.reused == 32
    assert_equal(served.cold, restored)


@pytest.mark.parametrize("other", [{"quant": QUANTS[1]}, {"layout": "LBHNC"}], ids=str)
def test_records_of_another_kind_of_cache_are_not_used(other: dict[str, object]) -> None:
    served = serve_cold(ModelConfig(), CacheConfig())
    served.engine.sleep()
    config = CacheConfig(**other)  # type: ignore[arg-type]
    engine = Engine(ModelConfig(), config, torch.device("cpu"), served.store)
    answer = engine.run(served.prompt, NEW_TOKENS)
    assert answer.reused == 0
    assert_equal(answer, serve_fresh(served.prompt, config))


# ---- the command


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    # An example imports kvoffload as users do; here it must be the one under test.
    environment = {**os.environ, "PYTHONPATH": str(Path(kvoffload.__file__).parents[1])}
    command = [sys.executable, str(EXAMPLES / "mini_engine/run.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=500, env=environment)


def test_the_command_shows_equal_tokens_and_logprobs() -> None:
    arguments = ("--layers", "hybrid", "--quant", "int8_per_token_head", "--blocks", "2", "--negative-control")
    done = run_command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = {line.split("  ")[0]: line.partition("; ")[2] for line in done.stdout.splitlines()}
    assert lines["cold"] == lines["restored"] != lines["full_attention zeroed"]
    assert "8 of 12 prompt tokens restored from 3 blocks" in done.stdout
    assert "tokens and logprobs equal, every bit: yes" in done.stdout
    assert "damage noticed in every group: yes" in done.stdout


def test_the_command_fails_when_a_restored_run_differs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mini_engine import run

    def half_loaded(self: BlockStore, moves: list[Move]) -> None:
        del self, moves

    monkeypatch.setattr(BlockStore, "load", half_loaded)
    monkeypatch.setattr(sys, "argv", ["run.py", "--blocks", "2"])
    assert run.main() == 1
    assert "every bit: NO" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--blocks", "1"], "1 blocks are too few"),
        (["--blocks", "x"], "invalid int value"),
        (["--blocks", "2", "--prompt-tokens", "30"], "33 tokens need 5 blocks"),
        (["--prompt-tokens", "8"], "9 or more"),
        (["--layers", "none"], "invalid choice"),
        (["--kv-heads", "3"], "divides the 4 query heads"),
        (["--kernel-split", "3"], "not 3 equal kernel blocks"),
        (["--kernel-split", "2", "--overlay"], "kernel blocks"),
        (["--colour"], "unrecognized arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments_are_one_clear_line(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from mini_engine import run

    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        run.main()
    output = capsys.readouterr()
    assert (stopped.value.code, output.out) == (2, "")
    assert output.err.startswith("error: ")
    assert text in output.err
    assert output.err.count("\n") == 1


# ---- the same on a GPU


@pytest.mark.gpu
@missing_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_restored_equals_cold_on_cuda(layout: str) -> None:
    for quant, blocks, is_overlaid in product(QUANTS, (2, 3, 64), (False, True)):
        config = CacheConfig(layout=layout, quant=quant, blocks=blocks, is_overlaid=is_overlaid)
        assert_restores(ModelConfig(), config, device="cuda")


@pytest.mark.gpu
@missing_gpu
def test_sleep_gives_the_memory_back_on_cuda() -> None:
    served = serve_cold(ModelConfig(), CacheConfig(quant=QUANTS[1]), device="cuda")
    storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in served.engine.cache.allocations.values()]
    served.engine.sleep()
    assert all(storage.expired() for storage in storages)
    served.engine.wake()
    assert_equal(served.cold, serve_restored(served))

"""The self-test runs through the engine that it is given, and a copy that fails or loses bytes fails it."""

from __future__ import annotations

import pytest
import torch

from kvoffload.errors import SelfTestError
from kvoffload.kvspec import build_page_map
from kvoffload.transfer import CopyDirection, CopyEngine, HostEngine, copy_self_test, run_copy_self_test
from tests.kit.kvspec.builders import qwen3next
from tests.kit.transfer.memory import random_memory
from tests.kit.transfer.stand_ins import FailingEngine, ForgetfulEngine, HeldEngine, PassingEngine

GEOMETRY = qwen3next(3)
PAGES = build_page_map(GEOMETRY)
FREE = dict.fromkeys(range(len(PAGES.groups)), 2)


def open_engine() -> tuple[HostEngine, dict[str, torch.Tensor]]:
    memory = random_memory(GEOMETRY)
    return HostEngine(PAGES, memory, threads=1), memory


def run(engine: CopyEngine, memory: dict[str, torch.Tensor]) -> None:
    run_copy_self_test(engine, PAGES, memory, free_blocks=FREE)


@pytest.mark.parametrize("has_digests", [False, True])
def test_every_group_is_saved_and_loaded_and_nothing_is_left_behind(has_digests: bool) -> None:
    inner, memory = open_engine()
    before = {name: flat.clone() for name, flat in memory.items()}
    with inner:
        engine = PassingEngine(inner)
        run_copy_self_test(engine, PAGES, memory, free_blocks=FREE, has_digests=has_digests, after=5)
        assert engine.poll() == []
    both = [CopyDirection.SAVE, CopyDirection.LOAD]
    assert [(direction, items.group.tolist(), after) for direction, items, after in engine.plans] == [
        (direction, [group], 5) for group in FREE for direction in both
    ]
    assert all(torch.equal(memory[name], flat) for name, flat in before.items())


def test_bytes_that_do_not_come_back_fail_it() -> None:
    inner, memory = open_engine()
    with inner, pytest.raises(SelfTestError, match="did not come back as saved"):
        run(ForgetfulEngine(inner), memory)


@pytest.mark.parametrize("direction", CopyDirection)
def test_a_copy_that_fails_is_named(direction: CopyDirection) -> None:
    inner, memory = open_engine()
    words = f"the {direction.value} of block 2 failed: {FailingEngine.FAULT}"
    with inner, pytest.raises(SelfTestError, match=words):
        run(FailingEngine(inner, direction), memory)


def test_a_copy_that_does_not_end_is_given_up_and_its_record_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[object] = []
    monkeypatch.setattr(copy_self_test, "unended_records", kept)
    inner, memory = open_engine()
    engine = HeldEngine(inner)
    engine.hold()
    with inner:
        with pytest.raises(SelfTestError, match="the save of block 2 failed: it did not end within 30 s"):
            run(engine, memory)
        assert len(kept) == 1
        engine.release()
        assert inner.fence(60)

"""The self-test finds what a broken copy path does, and leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given

from kvoffload.errors import BlockCountError, SelfTestError
from kvoffload.kvspec import KVGeometry, Registration, build_page_map, run_self_test
from tests.kit.kvspec.builders import allocate, dense, in_layout, qwen3next
from tests.kit.kvspec.strategies import at_least, geometries
from tests.kit.transfer.plain_copy import PlainCopy


@dataclass
class CopyPath:
    """The save and load under test, with what may go wrong between them."""

    geometry: KVGeometry
    memory: dict[str, torch.Tensor] = field(init=False)
    saved: list[tuple[int, int]] = field(default_factory=list)
    spoil: Callable[[torch.Tensor], torch.Tensor] = lambda record: record
    shift: int = 0

    def __post_init__(self) -> None:
        self.page_map = build_page_map(self.geometry)
        self.memory = {name: torch.arange(size).to(torch.uint8) for name, size in self.geometry.sizes.items()}
        self.copy = PlainCopy(self.page_map, self.memory)

    def save(self, group: int, block: int) -> torch.Tensor:
        self.saved.append((group, block))
        record = torch.zeros(1, self.page_map.groups[group].record_bytes, dtype=torch.uint8)
        self.copy.save(group, [block], record)
        return record

    def load(self, group: int, block: int, record: torch.Tensor) -> None:
        self.copy.load(group, [block + self.shift], self.spoil(record))

    def run(self, free_blocks: dict[int, int]) -> None:
        before = {name: flat.clone() for name, flat in self.memory.items()}
        neighbours = [name for name in before if not self.shift]
        try:
            run_self_test(self.page_map, self.memory, free_blocks=free_blocks, save=self.save, load=self.load)
        finally:
            assert all(torch.equal(self.memory[name], before[name]) for name in neighbours), "blocks are as they were"


@given(geometry=geometries())
@at_least(50)
def test_a_right_copy_path_passes_and_leaves_no_trace(geometry: KVGeometry) -> None:
    path = CopyPath(geometry)
    path.run(dict.fromkeys(range(len(geometry.groups)), geometry.num_blocks - 1))
    assert path.saved == [
        (index, geometry.num_blocks - 1) for index, group in enumerate(geometry.groups) if group.is_stored
    ]


def flip(byte: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def spoil(record: torch.Tensor) -> torch.Tensor:
        spoiled = record.clone()
        spoiled[0, byte] ^= 1
        return spoiled

    return spoil


@pytest.mark.parametrize(
    ("spoil", "layer", "start", "end", "count"),
    [
        (flip(0), "layers.0", 0, 1, "1 of 128"),
        (flip(70), "layers.1", 6, 7, "1 of 128"),
        (flip(127), "layers.1", 63, 64, "1 of 128"),
        (lambda record: record.roll(64, dims=1), "layers.0", 0, 64, ""),
        (lambda record: torch.cat([record[:, :60], 255 - record[:, 60:]], dim=1), "layers.0", 60, 64, "68 of 128"),
    ],
)
def test_a_failure_names_group_layer_and_bytes(
    spoil: Callable[[torch.Tensor], torch.Tensor], layer: str, start: int, end: int, count: str
) -> None:
    path = CopyPath(dense(3, num_layers=2), spoil=spoil)
    with pytest.raises(SelfTestError) as caught:
        path.run({0: 1})
    error = caught.value
    assert (error.context["group"], error.context["layer"], error.context["start"]) == ("full", layer, start)
    assert error.context["end"] == end or (not count and error.context["end"] <= end)  # type: ignore[operator]
    assert count in str(error)
    assert f"group full, layer {layer}, part kv: bytes {start} to " in str(error)
    assert error.remedy


def test_a_load_that_does_nothing_is_found() -> None:
    path = CopyPath(in_layout("LHBNC", num_layers=1, num_blocks=2))
    path.load = lambda group, block, record: None  # type: ignore[method-assign]
    with pytest.raises(SelfTestError, match=r"bytes 0 to 65536 of block 1 did not come back .*65536 of 65536"):
        path.run({0: 1})


def test_a_load_to_another_block_is_found() -> None:
    path = CopyPath(dense(3), shift=1)
    with pytest.raises(SelfTestError, match="bytes 0 to 64 of block 1"):
        path.run({0: 1})


def test_one_broken_group_among_good_ones_is_named() -> None:
    path = CopyPath(qwen3next(3))
    good = path.load

    def load(group: int, block: int, record: torch.Tensor) -> None:
        good(group, block, record if group != 2 else record.roll(1))

    path.load = load  # type: ignore[method-assign]
    with pytest.raises(SelfTestError, match=r"group group 2, layer layers\.2\.linear_attn, part state"):
        path.run(dict.fromkeys(range(4), 2))


@pytest.mark.parametrize("verb", ["save", "load"])
def test_errors_of_the_copy_path_pass_through_and_blocks_are_restored(verb: str) -> None:
    path = CopyPath(dense(3))

    def fail(*_: object) -> None:
        raise OSError("disk full")

    setattr(path, verb, fail)
    with pytest.raises(OSError, match="disk full"):
        path.run({0: 2})


def test_every_stored_group_needs_a_free_block() -> None:
    with pytest.raises(SelfTestError, match="group group 1: no free block to test with"):
        CopyPath(qwen3next(2)).run({0: 1})


def test_the_null_block_is_no_free_block() -> None:
    with pytest.raises(BlockCountError, match="null block"):
        CopyPath(qwen3next(2)).run(dict.fromkeys(range(4), 0))


def test_it_is_the_hook_of_a_registration() -> None:
    geometry = dense(3)
    path = CopyPath(geometry, spoil=flip(3))
    registration = Registration()
    tensors = allocate(geometry)
    with pytest.raises(SelfTestError):
        registration.register(
            geometry,
            tensors.views,
            self_test=lambda page_map, memory: run_self_test(
                page_map, path.memory, free_blocks={0: 1}, save=path.save, load=path.load
            ),
        )
    assert not registration.is_registered

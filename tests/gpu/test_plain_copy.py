"""The plain copy engine copies on a GPU with the real driver as on the host, byte for byte."""

from __future__ import annotations

import pytest
import torch

from kvoffload import native
from kvoffload.kvspec import Registration, build_page_map, run_self_test
from tests.kit.kvspec.builders import allocate, qwen3next
from tests.kit.transfer.gpu_copies import CASES, make_geometry
from tests.kit.transfer.plain_copy import PlainCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: torch finds no CUDA device"),
]


@pytest.mark.parametrize("case", CASES)
def test_saved_scrubbed_and_loaded_blocks_are_the_hosts(case: str) -> None:
    geometry = make_geometry(case)
    host, device = allocate(geometry), allocate(geometry, "cuda")
    registrations = {"host": Registration(), "device": Registration()}
    registrations["host"].register(geometry, host.views, scale_views=host.scales)
    registrations["device"].register(geometry, device.views, scale_views=device.scales)
    for name, flat in registrations["host"].memory.items():
        flat.random_(0, 256)
        registrations["device"].memory[name].copy_(flat)
    page_map = build_page_map(geometry)
    on_host, on_device = (PlainCopy(page_map, registration.memory) for registration in registrations.values())
    blocks = list(range(0, geometry.num_blocks, 3)) or [0]
    blocks = [block for block in blocks if block != geometry.null_block]
    for group, pages in enumerate(page_map.groups):
        expected = torch.empty((len(blocks), pages.record_bytes), dtype=torch.uint8)
        records = expected.to("cuda")
        on_host.save(group, blocks, expected)
        on_device.save(group, blocks, records)
        assert torch.equal(records.cpu(), expected)
        on_device.load(group, blocks, torch.zeros_like(records))
        on_device.load(group, blocks, records)
    for name, flat in registrations["host"].memory.items():
        assert torch.equal(registrations["device"].memory[name].cpu(), flat)


def test_the_self_test_passes_on_the_device() -> None:
    geometry = qwen3next(3)
    tensors = allocate(geometry, "cuda")
    registration = Registration()
    registration.register(geometry, tensors.views, scale_views=tensors.scales)
    copy = PlainCopy(registration.page_map, registration.memory)

    def save(group: int, block: int) -> torch.Tensor:
        rows = torch.empty((1, registration.page_map.groups[group].record_bytes), dtype=torch.uint8, device="cuda")
        copy.save(group, [block], rows)
        return rows.cpu()

    def load(group: int, block: int, rows: torch.Tensor) -> None:
        copy.load(group, [block], rows.to("cuda"))

    free = dict.fromkeys(range(len(geometry.groups)), 2)
    run_self_test(registration.page_map, registration.memory, free_blocks=free, save=save, load=load)


def test_the_driver_and_its_devices_are_seen() -> None:
    seen = native.capabilities(probe_devices=True)
    assert seen.has_cuda_driver
    assert seen.cuda_devices is not None
    assert [device.compute_capability for device in seen.cuda_devices] == [
        torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())
    ]

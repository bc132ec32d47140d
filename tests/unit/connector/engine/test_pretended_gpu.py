"""A process that pretends finds a GPU. tests/vllm/test_gallery.py makes whole models there."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

from kvoffload.connector.engine.pretended_gpu import CAPABILITY, KERNELS, PACKAGES, WithoutMemory

SEEN = """
import importlib, json
from kvoffload.connector.engine.pretended_gpu import KERNELS, PACKAGES, pretend
pretend()
import torch
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON
from torchvision.transforms.v2 import InterpolationMode
class Inherited(InterpolationMode): pass
try:
    importlib.import_module("vllm.no_such_module")
    missing = "found"
except ModuleNotFoundError as fault:
    missing = fault.name
print(json.dumps({
    "is_cuda": current_platform.is_cuda(),
    "capability": list(current_platform.get_device_capability()),
    "triton": HAS_TRITON,
    "modules": sorted(importlib.import_module(name).__name__ for name in (*KERNELS, *PACKAGES)),
    "missing": missing,
    "kernel": torch.ops._C.no_such_kernel(7),
    "support": torch.ops._C.cutlass_scaled_mm_supports_fp4(90),
    "sum": torch.ops.aten.add(torch.tensor(1), torch.tensor(2)).item(),
}))
"""


def test_vllm_finds_a_gpu_and_all_modules_that_its_models_import_on_one() -> None:
    done = subprocess.run([sys.executable, "-c", SEEN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "is_cuda": True,
        "capability": list(CAPABILITY),
        "triton": True,
        "modules": sorted((*KERNELS, *PACKAGES)),
        "missing": "vllm.no_such_module",
        "kernel": 7,
        "support": False,
        "sum": 3,
    }


def test_this_process_is_left_alone() -> None:
    assert not [name for name in KERNELS if name in sys.modules]


def test_tensors_that_are_pinned_take_no_memory() -> None:
    with WithoutMemory():
        assert torch.empty(1 << 50, device="cpu", pin_memory=True).is_meta
        assert not torch.empty(4, pin_memory=False).is_meta
        assert torch.zeros(4).sum().item() == 0

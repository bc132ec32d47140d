"""Lets vLLM's CPU build make a model's modules as they are made on a GPU, to ask them what they keep.

Only for a process of its own that ends with its answer: nothing is computed there. Kernels that the CPU build does not
have are replaced where an import or a constructor asks for them; a kernel that is called returns what it was given.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CAPABILITY = (9, 0)
"""The GPU's generation as CUDA counts them: that of an H100 and an H200."""
MEMORY_BYTES = 141 << 30
PROCESSORS = 132
KERNELS = (
    "deep_gemm",
    "vllm._C_stable_libtorch",
    "vllm._flashkda_C",
    "vllm.third_party.deep_gemm",
    "vllm.vllm_flash_attn._vllm_fa2_C",
    "vllm.vllm_flash_attn._vllm_fa3_C",
)
"""Modules of compiled kernels that vLLM's models import on a GPU. None of them works without one."""
PACKAGES = ("torchvision",)
"""Packages that vLLM's models import on a GPU, and that its CPU build does without."""


class WithoutMemory(TorchFunctionMode):
    """Makes tensors without memory, also those that the model's code places on a device or pins itself."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if given.pop("pin_memory", False):
            given["device"] = "meta"
        return func(*args, **given)


def pretend() -> None:
    """Call it before anything else of vLLM is imported."""
    import transformers.image_utils
    import transformers.processing_utils  # noqa: F401  (they look for torchvision, and would take the stand-in for it)

    sys.meta_path.insert(0, _Absent(KERNELS))
    sys.meta_path.append(_Absent(PACKAGES))
    _replace_platform()
    _replace_kernels()
    _replace_devices()


class _AnythingType(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnythingType(name, (), {})


class _Anything(ModuleType):
    """A module of which every name is a class, to be imported or inherited from."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AnythingType(name, (), {})


class _Absent(MetaPathFinder, Loader):
    """Finds these modules, with all inside them."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        is_one = any(fullname == name or fullname.startswith(f"{name}.") for name in self.names)
        return ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Anything(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: the names are there already."""


def _replace_platform() -> None:
    from vllm import platforms

    # vLLM takes Triton where exactly one GPU's driver is found, and its own build is not for the CPU.
    _set(platforms, vllm_version_matches_substr=lambda part: False, _current_platform=_make_platform())
    driver = import_module("triton.backends").backends["nvidia"].driver
    is_active = driver.is_active
    driver.is_active = staticmethod(lambda: True)
    try:
        import vllm.triton_utils  # noqa: F401
    finally:
        driver.is_active = is_active


def _make_platform() -> Any:
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class PretendedGpu(CudaPlatformBase):
        device_type = "meta"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*CAPABILITY)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "a GPU that is not there"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return MEMORY_BYTES

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            return False

        @classmethod
        def device_count(cls) -> int:
            return 1

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return PROCESSORS

        @classmethod
        def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
            """All are supported."""

        @classmethod
        def current_device(cls) -> torch.device:
            return torch.device("meta")

        @classmethod
        def is_pin_memory_available(cls) -> bool:
            return True

    return PretendedGpu()


class _Kernel:
    """A kernel that is not there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kernel(f"{self.name}.{name}")

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        if "support" in self.name:
            return False
        return arguments[0] if arguments else None


def _replace_kernels() -> None:
    from torch._ops import _OpNamespace

    find, register_fake = _OpNamespace.__getattr__, torch.library.register_fake

    def find_or_replace(self: Any, name: str) -> Any:
        try:
            return find(self, name)
        except AttributeError:
            if name.startswith("__") or not self.name.startswith("_"):
                raise
            return _Kernel(f"{self.name}.{name}")

    def register_if_there(name: Any, *arguments: Any, **more: Any) -> Any:
        def register(function: Any) -> Any:
            try:
                return register_fake(name, *arguments, **more)(function)
            except RuntimeError:  # there is no such operator
                return function

        return register

    _set(_OpNamespace, __getattr__=find_or_replace)
    _set(torch.library, register_fake=register_if_there)
    import vllm.envs
    from vllm.model_executor.models import registry
    from vllm.utils import import_utils

    _set(vllm.envs, VLLM_KIMI_K3_GEMM_AR=False)  # it would import CUTLASS
    _set(import_utils, has_deep_gemm=lambda: True)
    # vLLM looks at a model's class in a process of its own, which would know nothing of all this.
    _set(registry, _run_in_subprocess=lambda look: look())


def _replace_devices() -> None:
    processors = SimpleNamespace(multi_processor_count=PROCESSORS)
    _set(
        torch.cuda, Stream=SimpleNamespace, Event=SimpleNamespace, get_device_properties=lambda device=None: processors
    )
    _set(torch.accelerator, current_device_index=lambda: 0, empty_cache=lambda: None)


def _set(place: Any, **names: Any) -> None:
    for name, value in names.items():
        setattr(place, name, value)

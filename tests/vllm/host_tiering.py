"""vLLM's own tiering on a machine without a GPU: its spec, its worker and its arithmetic of pages, with streams and
events that have nothing to wait for, and copies that are done when they are asked for.

vLLM's CPU build refuses to make the worker, for want of these three alone.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering import spec
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _Stream:
    """A stream of a device that has done everything by the time it is asked."""

    def wait_stream(self, other: object) -> None: ...
    def wait_event(self, event: object) -> None: ...


class _Event:
    def __init__(self, **settings: object) -> None: ...
    def record(self, stream: object) -> None: ...
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: object) -> float:
        return 0.0


class _Device(torch.Tensor):
    """The engine's pages, which vLLM wants on a GPU."""

    is_cuda = True


class _With:
    """Another module or object with some of its names replaced."""

    def __init__(self, other: Any, **replaced: Any) -> None:
        self._other = other
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


@contextlib.contextmanager
def _on(stream: object) -> Iterator[None]:
    yield


def _copy(source: torch.Tensor, target: torch.Tensor, sizes: torch.Tensor, **settings: object) -> None:
    for begin, end, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(end, begin, size)


class HostTieringSpec(TieringOffloadingSpec):
    """`spec_name` and `spec_module_path` name it."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        worker: Any = gpu_worker
        worker.torch = _With(torch, Event=_Event)
        worker.current_platform = _With(gpu_worker.current_platform, Stream=_Stream, current_stream=_Stream, stream=_on)
        # private: what copies blocks on a GPU, which nothing else replaces
        worker._select_swap_blocks_fn = lambda *given, **named: _copy
        if hasattr(spec, "torch"):  # 0.31 asks which GPU it is
            spec.torch = _With(torch, accelerator=SimpleNamespace(current_device_index=lambda: 0))
        if not self._worker:
            tensors = [replace(one, tensor=one.tensor.as_subclass(_Device)) for one in kv_caches.tensors]
            self._worker = self.create_worker(replace(kv_caches, tensors=tensors))
        return self._worker

"""Puts a real engine in this process to sleep, by vLLM's own code in its core, its executor and its GPU worker.

The CPU build's worker does nothing when it is told to sleep. Here it does what the class that it is made from does; the
memory of the KV cache, which that one unmaps, is only overwritten: what comes back holds nothing of what it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any
from unittest.mock import patch

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine

ALL_MEMORY = (1 << 30, 1 << 30)
"""Free and total, before a sleep and after it: of an accelerator that is not there."""


class TakenMemory:
    """A mechanism that frees memory and brings it back, as vLLM's workers have one; notes what it was told."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self._tensors = list(tensors)
        self.seen: list[tuple[str, bool]] = []
        """Calls, and whether our worker side held the engine's tensors at that time."""

    def suspend(self, level: int = 1) -> None:
        self._take("suspend")

    def resume(self, tags: list[str] | None = None) -> None:
        self._note("resume")

    def discard(self, tags: tuple[str, ...]) -> None:
        self._take("discard")

    def _note(self, what: str) -> None:
        self.seen.append((what, probe.worker_side().registration.is_registered))

    def _take(self, what: str) -> None:
        self._note(what)
        for tensor in self._tensors:
            tensor.untyped_storage().fill_(0x7F)


def tells_connectors() -> bool:
    """Whether this vLLM tells connectors of a sleep: from 0.33 on."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return hasattr(KVConnectorBase_V1, "unregister_kv_caches")


@contextmanager
def sleepy(engine: Engine) -> Iterator[TakenMemory]:
    """Within it, `engine.llm.sleep` and `wake_up` do what they do on a GPU, but for its memory."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    worker = engine.core.model_executor.driver_worker.worker
    backend = TakenMemory(_flatten(worker.model_runner.kv_caches))
    worker._sleep_mode_backend = backend  # private: vLLM makes it itself, for GPUs alone
    names = ("sleep", "wake_up", "discard")
    for name in names:
        setattr(worker, name, MethodType(getattr(Worker, name), worker))
    try:
        with (
            patch.object(torch.accelerator, "synchronize", lambda *given: None),
            patch.object(torch.accelerator, "get_memory_info", lambda *given: ALL_MEMORY),
        ):
            yield backend
    finally:
        worker._sleep_mode_backend = None  # private: as above
        for name in names:
            delattr(worker, name)


def _flatten(caches: Any) -> Iterator[Any]:
    """Tensors of layers, some of which have several."""
    for one in caches:
        if isinstance(one, list | tuple):
            yield from _flatten(one)
        else:
            yield one

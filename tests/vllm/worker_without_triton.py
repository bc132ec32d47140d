"""vLLM's worker for processors, for models of which a part is written in Triton only."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from tests.vllm.tiny_deepseek_v4 import replace_triton_kernels


class WorkerWithoutTriton(CPUWorker):  # type: ignore[misc]
    def load_model(self, *args: Any, **more: Any) -> None:
        replace_triton_kernels()
        super().load_model(*args, **more)

"""Our linker, with one pool's loaded rows made zeros where a file asks for it: the control of what a load brings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvoffload.sglang import plugin

Base: Any = plugin.KVOffloadLinker


class ZeroingLinker(Base):
    """`zeroed_file` among its settings: a file that holds SGLang's name of a pool, or is not there."""

    def __init__(self, server_args: Any, params: Any, *, extra_config: Mapping[str, object], **others: Any) -> None:
        settings = dict(extra_config)
        self._file = Path(str(settings.pop("zeroed_file")))
        self._pool = params.token_to_kv_pool_allocator.get_kvcache()
        super().__init__(server_args, params, extra_config=settings, **others)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        is_there = bool(super().load(rid, transfers))
        zeroed = self._file.read_text() if self._file.exists() else ""
        for transfer in transfers:
            if transfer.name.value == zeroed:
                for buffer in self._list_buffers(zeroed):
                    buffer[transfer.device_indices] = 0
        return is_there

    def _list_buffers(self, name: str) -> list[Any]:
        """By rows, or by slots."""
        if name == "mamba":
            states = self._pool.mamba_pool.mamba_cache
            return [layer for kind in (*states.conv, states.temporal) for layer in kind]
        pool = self._pool.swa_kv_pool if name == "swa" else getattr(self._pool, "full_kv_pool", self._pool)
        return [*pool.k_buffer, *pool.v_buffer]

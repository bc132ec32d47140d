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
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self._memory = {"kv": getattr(pool, "full_kv_pool", pool), "swa": getattr(pool, "swa_kv_pool", None)}
        super().__init__(server_args, params, extra_config=settings, **others)

    def load(self, rid: str, transfers: list[Any]) -> bool:
        is_there = bool(super().load(rid, transfers))
        zeroed = self._file.read_text() if self._file.exists() else ""
        for transfer in transfers:
            if transfer.name.value == zeroed:
                pool = self._memory[zeroed]
                for buffer in (*pool.k_buffer, *pool.v_buffer):
                    buffer[transfer.device_indices] = 0
        return is_there

"""What SGLang loads by name: `KVOffloadLinker`, of this module, for `--unified-cache-external-linker-backend dynamic`.

The class is made when somebody asks for it, because what it derives from is SGLang's: until then this module imports
nothing of SGLang, and kvoffload may be used beside any engine.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvoffload.connector.degrade import degrade
from kvoffload.sglang.tested import EngineParts, refuse_untested

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LINKER_NAME = "KVOffloadLinker"
KV_POOL = "kv"


def __getattr__(name: str) -> Any:
    if name == LINKER_NAME:
        return make_linker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def make_linker_class() -> type:
    """UnsupportedError: this SGLang is not the one that was tested."""
    import sglang
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

    version = str(sglang.__version__)
    refuse_untested(
        EngineParts(version=version, linker=UnifiedCacheLinker, counter=LayerWiseLoadCounter, transfer=PoolTransfer)
    )
    return derive_linker(UnifiedCacheLinker, LayerWiseLoadCounter, version=version, pool_name=PoolName.KV)


def derive_linker(base: Any, counter: Any, *, version: str, pool_name: Any) -> type:
    """Of SGLang's own classes; a test gives others of their form."""

    class KVOffloadLinker(base):  # type: ignore[misc]
        """As SGLang's scheduler calls it, on its thread. A fault of ours is a miss, and no fault of the engine."""

        def __init__(
            self,
            server_args: Any,
            params: Any,
            *,
            components: set[Any],
            extra_config: Mapping[str, object] | None = None,
            forward_stream: Any = None,
        ) -> None:
            from kvoffload.sglang.start_up import start_linker

            _join_engine_log()
            self.forward_stream = forward_stream
            self._pages, self._weights, pool = start_linker(
                server_args, params, components=components, extra_config=extra_config, version=version
            )
            self.layer_done_counter = counter(pool.num_layers)
            self.pools = {pool_name: pool}

        def note_fault(self, hook: str, fault: Exception) -> None:
            self._pages.note_fault(hook, fault)

        @degrade(_nothing)
        def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
            self._look_at_weights()
            return self._pages.lookup(rid, _find_keys(transfers))

        def load(self, rid: str, transfers: list[Any]) -> bool:
            return self._pages.load(rid, _find_keys(transfers), _find_rows(transfers))

        def start_layer_wise_loading(self) -> int:
            loaded = self._pages.take_loaded()
            if not loaded:
                return -1
            index = int(self.layer_done_counter.update_producer())
            if all(loaded):
                for layer in range(self.layer_done_counter.num_layers):
                    self.layer_done_counter.complete(index, layer)
            else:
                self.layer_done_counter.fail(index, RuntimeError("pages did not come"))
            return index

        def finish_layer_wise_loading(self, counter_index: int) -> bool:
            """Waits for nothing: all that was begun has ended."""
            return bool(self.layer_done_counter.finish(counter_index))

        @degrade(bool)
        def cancel_queued_load(self, rid: str) -> bool:
            return self._pages.cancel_load(rid)

        def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
            """Every offer is taken, on every rank; what became of it is told when it is done."""
            self._look_at_weights()
            self._pages.offload(_find_keys(transfers), _find_rows(transfers))
            return True

        def num_completed_offloads(self) -> int:
            self._pages.begin_step()
            return self._pages.count_done()

        def pop_completed_offload(self) -> bool:
            return self._pages.pop_done()

        def reset(self) -> None:
            self._pages.reset(self._weights.take())
            self.layer_done_counter.reset()

        def close(self) -> None:
            self._pages.close()

        def _look_at_weights(self) -> None:
            if self._weights.has_changed():
                self._pages.distrust()

    return KVOffloadLinker


def _nothing() -> list[int]:
    return []


def _find_keys(transfers: list[Any]) -> list[str]:
    """Of the one pool that is served."""
    (transfer,) = transfers
    if str(getattr(transfer.name, "value", transfer.name)) != KV_POOL:
        raise ValueError(f"pool {transfer.name} is not served")
    return transfer.keys or []


def _find_rows(transfers: list[Any]) -> npt.NDArray[np.int64]:
    (transfer,) = transfers
    rows: npt.NDArray[np.int64] = transfer.device_indices.cpu().numpy()
    return rows


def _join_engine_log() -> None:
    """SGLang writes by the root logger's handlers, at the level that its arguments say."""
    logging.getLogger("kvoffload").setLevel(logging.NOTSET)

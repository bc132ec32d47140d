"""The linker class that SGLang loads by name, `KVOffloadLinker`, for `--unified-cache-external-linker-backend dynamic`.

The class is made when it is first asked for, because it derives from a class of SGLang's. Until then this module
imports nothing of SGLang, and kvoffload may be used with any engine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvoffload.engines.degrade import degrade
from kvoffload.sglang.tested import EngineParts, refuse_untested
from kvoffload.sglang.weight_updates import WeightUpdates, watch_updates

if TYPE_CHECKING:
    from kvoffload.sglang.page_linker import GroupRows

LINKER_NAME = "KVOffloadLinker"


def __getattr__(name: str) -> Any:
    if name == LINKER_NAME:
        return make_linker_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def make_linker_class() -> type:
    """UnsupportedError: this SGLang is not the one that was tested."""
    import sglang
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

    version = str(sglang.__version__)
    refuse_untested(
        EngineParts(
            version=version,
            linker=UnifiedCacheLinker,
            counter=LayerWiseLoadCounter,
            transfer=PoolTransfer,
            updater=SchedulerWeightUpdaterManager,
        )
    )
    return derive_linker(
        UnifiedCacheLinker,
        LayerWiseLoadCounter,
        version=version,
        pool_name=PoolName,
        updates=watch_updates(SchedulerWeightUpdaterManager),
    )


def derive_linker(
    base: Any, counter: Any, *, version: str, pool_name: Callable[[str], Any], updates: WeightUpdates | None = None
) -> type:
    """Derives the linker from SGLang's own classes; a test gives others of their form. `pool_name` makes SGLang's name
    of a pool's, `updates` are those of the engine's weights."""

    class KVOffloadLinker(base):  # type: ignore[misc]
        """The linker that SGLang's scheduler calls, on its thread. A fault of ours is a miss, and no fault of the
        engine."""

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

            self.forward_stream = forward_stream
            self._pages, self._weights, pool = start_linker(
                server_args,
                params,
                components=components,
                extra_config=extra_config,
                version=version,
                updates=updates,
            )
            self.layer_done_counter = counter(pool.num_layers)
            self._groups = {name: group for group, name in enumerate(pool.group_names)}
            self.pools = {pool_name(name): pool for name in pool.group_names}

        def note_fault(self, hook: str, fault: Exception) -> None:
            self._pages.note_fault(hook, fault)

        @degrade(_nothing)
        def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
            self._look_at_weights()
            return self._pages.lookup(rid, _find_keys(transfers, self._groups))

        def load(self, rid: str, transfers: list[Any]) -> bool:
            return self._pages.load(rid, _find_parts(transfers, self._groups))

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
            self._pages.offload(_find_parts(transfers, self._groups))
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
            if self._pages.is_distrusted or not self._weights.has_changed():
                return
            if not self._weights.is_proved_equal():
                self._pages.distrust()

    return KVOffloadLinker


def _nothing() -> list[int]:
    return []


def _find_keys(transfers: list[Any], groups: Mapping[str, int]) -> list[str]:
    """Returns the keys of all pages; those of the other groups are the last ones of them."""
    return next(transfer.keys or [] for transfer in transfers if _find_group(transfer, groups) == 0)


def _find_parts(transfers: list[Any], groups: Mapping[str, int]) -> list[GroupRows]:
    from kvoffload.sglang.page_linker import GroupRows

    return [
        GroupRows(_find_group(transfer, groups), transfer.keys or [], transfer.device_indices.cpu().numpy())
        for transfer in transfers
    ]


def _find_group(transfer: Any, groups: Mapping[str, int]) -> int:
    name = str(getattr(transfer.name, "value", transfer.name))
    if name not in groups:
        raise ValueError(f"pool {transfer.name} is not served")
    return groups[name]

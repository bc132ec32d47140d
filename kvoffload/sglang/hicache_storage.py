"""The storage class that SGLang loads by name for HiCache, `KVOffloadStorage`, for `--hicache-storage-backend dynamic`.

Pages go straight between HiCache's host pool and the server's memory. Like the linker's class, this one is made when it
is first asked for, so that until then nothing of SGLang is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvoffload.engines.degrade import degrade
from kvoffload.errors import ConfigError, UnsupportedError
from kvoffload.sglang.pools import KV
from kvoffload.sglang.tested import StorageParts, refuse_untested_storage
from kvoffload.sglang.weight_updates import WeightUpdates, watch_updates

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvoffload.sglang.host_pages import HostPages

STORAGE_NAME = "KVOffloadStorage"
SETTINGS = "settings"
"""The key of our own settings in `--hicache-storage-backend-extra-config`. The other keys there are SGLang's."""


def __getattr__(name: str) -> Any:
    if name == STORAGE_NAME:
        return make_storage_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def make_storage_class() -> type:
    """UnsupportedError: this SGLang is not the one that was tested."""
    import sglang
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolTransfer, PoolTransferResult
    from sglang.srt.runtime_context import get_parallel, get_server_args

    version = str(sglang.__version__)
    refuse_untested_storage(
        StorageParts(
            version=version,
            storage=HiCacheStorage,
            transfer=PoolTransfer,
            result=PoolTransferResult,
            updater=SchedulerWeightUpdaterManager,
        )
    )
    return derive_storage(
        HiCacheStorage,
        PoolTransferResult,
        version=version,
        find_arguments=get_server_args,
        find_group=lambda: get_parallel().tp_group.cpu_group,
        updates=watch_updates(SchedulerWeightUpdaterManager),
    )


def derive_storage(
    base: Any,
    result: Any,
    *,
    version: str,
    find_arguments: Callable[[], Any],
    find_group: Callable[[], Any],
    updates: WeightUpdates | None = None,
) -> type:
    """Derives the storage from SGLang's own classes; a test gives others of their form. `find_group` gives that of the
    engine's ranks, `updates` are those of its weights."""

    class KVOffloadStorage(base):  # type: ignore[misc]
        """The storage that HiCache's threads call. A fault of ours is a miss, and no fault of the engine."""

        def __init__(self, storage_config: Any, given: Any) -> None:
            extra = storage_config.extra_config or {}
            if not extra.get("interface_v1"):
                raise ConfigError(
                    "--hicache-storage-backend-extra-config lacks interface_v1: pages would be copied once more",
                    remedy='add "interface_v1": 1',
                )
            self._config = storage_config
            self._settings = extra.get(SETTINGS, {})
            self._pages: HostPages | None = None
            self._host_pool: Any = None

        def note_fault(self, hook: str, fault: Exception) -> None:
            if self._pages is not None:
                self._pages.note_fault(hook, fault)

        def register_mem_pool_host(self, mem_pool_host: Any) -> None:
            """UnsupportedError: a pool that is not served, and what to do instead; the engine does not start."""
            from kvoffload.sglang.start_up import start_host_pages

            super().register_mem_pool_host(mem_pool_host)
            self._host_pool = mem_pool_host
            self._pages = start_host_pages(
                find_arguments(),
                mem_pool_host,
                rank=self._config.tp_rank,
                settings=self._settings,
                is_same_everywhere=self._config.is_mla_model,
                version=version,
                updates=updates,
                group=find_group(),
            )

        def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
            if _name(host_pool_name) != KV or host_pool is not self._host_pool:
                self.close()
                raise UnsupportedError(
                    f"kvoffload does not serve HiCache's host pool {_name(host_pool_name)} yet",
                    remedy="run this model without a storage backend",
                )
            super().register_mem_host_pool_v2(host_pool, host_pool_name)

        # ---- pages of the one pool ----

        @degrade(int)
        def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
            return self._open().count(keys)

        def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
            count = self._fetch(keys, host_indices)
            return [at < count for at in range(len(keys))]

        def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
            return [self._back_up(keys, host_indices)] * len(keys)

        def exists(self, key: str) -> bool:
            return bool(self.batch_exists([key]))

        # ---- the same, by pools ----

        def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
            pages = 0 if self._find_strange(pool_transfers) else self.batch_exists(keys)
            return result(pages, {KV: pages} if pages else {}, list(range(1, pages + 1)))

        def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
            return self._do_each(transfers, self.batch_get_v1)

        def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:
            return self._do_each(transfers, self.batch_set_v1)

        # ---- methods that HiCache does not call with interface_v1 ----

        def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
            raise _refuse_copies()

        def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
            raise _refuse_copies()

        def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
            raise _refuse_copies()

        def batch_set(
            self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
        ) -> bool:
            raise _refuse_copies()

        # ---- the storage as a whole ----

        def clear(self) -> None:
            raise UnsupportedError(
                "the pool is the server's, and other engines may have pages in it",
                remedy="restart the server to empty it",
            )

        def close(self) -> None:
            pages, self._pages = self._pages, None
            if pages is not None:
                pages.close()

        def _open(self) -> HostPages:
            if self._pages is None:
                raise UnsupportedError("HiCache has registered no host pool", remedy="")
            return self._pages

        @degrade(int)
        def _fetch(self, keys: Sequence[str], host_indices: Any) -> int:
            return self._open().fetch(keys, _rows(host_indices))

        @degrade(bool)
        def _back_up(self, keys: Sequence[str], host_indices: Any) -> bool:
            return self._open().back_up(keys, _rows(host_indices))

        def _find_strange(self, transfers: Any) -> list[Any]:
            return [transfer for transfer in transfers or () if _name(transfer.name) != KV]

        def _do_each(self, transfers: Any, do: Any) -> dict[Any, list[bool]]:
            strange = self._find_strange(transfers)
            done: dict[Any, list[bool]] = {one.name: [False] * len(one.keys or ()) for one in strange}
            for one in transfers:
                if one not in strange:
                    done[one.name] = do(one.keys or [], one.host_indices)
            return done

    return KVOffloadStorage


def _name(pool_name: Any) -> str:
    return str(getattr(pool_name, "value", pool_name))


def _rows(host_indices: Any) -> npt.NDArray[np.int64]:
    rows: npt.NDArray[np.int64] = host_indices.cpu().numpy()
    return rows


def _refuse_copies() -> UnsupportedError:
    return UnsupportedError("pages are not copied one by one", remedy='add "interface_v1": 1 to the extra config')

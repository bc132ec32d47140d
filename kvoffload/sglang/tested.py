"""The exact parts of SGLang that were tested. Another version is refused with one line that says what differs.

SGLang's linker is new and its interface changes between releases; a hook that is called otherwise than we think would
restore wrong bytes, or none.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvoffload.errors import UnsupportedError
from kvoffload.sglang.weight_updates import CHECK, SELECT

VERSION = "0.5.23"
SHOWN_DIFFERENCES = 3

LINKER = {
    "record_offload_ready": "(self)",
    "lookup": "(self, rid, transfers)",
    "load": "(self, rid, transfers)",
    "start_layer_wise_loading": "(self)",
    "finish_layer_wise_loading": "(self, counter_index)",
    "cancel_queued_load": "(self, rid)",
    "offload": "(self, transfers, session_id)",
    "num_completed_offloads": "(self)",
    "pop_completed_offload": "(self)",
    "reset": "(self)",
    "close": "(self)",
}
COUNTER = {
    "__init__": "(self, num_layers, on_layer_ready)",
    "update_producer": "(self)",
    "set_consumer": "(self, index)",
    "complete": "(self, index, layer)",
    "fail": "(self, index, error)",
    "wait_until": "(self, threshold)",
    "finish": "(self, index)",
    "reset": "(self)",
}
TRANSFER = {
    "__init__": "(self, name, host_indices, device_indices, keys, hit_policy, nodes_to_load, indices_from_pool, "
    "block_pages, group_pages)"
}
STORAGE = {
    "register_mem_pool_host": "(self, mem_pool_host)",
    "register_mem_host_pool_v2": "(self, host_pool, host_pool_name)",
    "on_host_pools_registered": "(self)",
    "batch_exists_v2": "(self, keys, pool_transfers, extra_info)",
    "batch_get_v2": "(self, transfers, extra_info)",
    "batch_set_v2": "(self, transfers, extra_info)",
    "batch_exists": "(self, keys, extra_info)",
    "batch_get_v1": "(self, keys, host_indices, extra_info)",
    "batch_set_v1": "(self, keys, host_indices, extra_info)",
    "get": "(self, key, target_location, target_sizes)",
    "batch_get": "(self, keys, target_locations, target_sizes)",
    "set": "(self, key, value, target_location, target_sizes)",
    "batch_set": "(self, keys, values, target_locations, target_sizes)",
    "exists": "(self, key)",
    "clear": "(self)",
    "get_stats": "(self)",
}
RESULT = {"__init__": "(self, kv_hit_pages, extra_pool_hit_pages, restorable_prefix_pages)"}

UPDATER = {
    "begin_weight_update": "(self, recv_req)",
    "end_weight_update": "(self, recv_req)",
    "update_weights_from_disk": "(self, recv_req)",
    "update_weights_from_distributed": "(self, recv_req)",
    "update_weights_from_ipc": "(self, recv_req)",
    "update_weights_from_tensor": "(self, recv_req)",
}
"""Each calls `SELECT` before it changes anything."""


@dataclass(frozen=True, kw_only=True)
class StorageParts:
    """The parts of HiCache that are used."""

    version: str
    storage: type
    transfer: type
    result: type
    updater: type


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The engine's own, as this process has imported them."""

    version: str
    linker: type
    counter: type
    transfer: type
    updater: type


def refuse_untested(parts: EngineParts) -> None:
    """UnsupportedError: this is another version, or its interface is not what was tested."""
    differences = [
        *_differences("UnifiedCacheLinker", parts.linker, LINKER),
        *_differences("LayerWiseLoadCounter", parts.counter, COUNTER),
        *_differences("PoolTransfer", parts.transfer, TRANSFER),
        *_update_differences(parts.updater),
    ]
    _refuse(parts.version, differences, what="linker")


def refuse_untested_storage(parts: StorageParts) -> None:
    """UnsupportedError, for what HiCache calls."""
    differences = [
        *_differences("HiCacheStorage", parts.storage, STORAGE),
        *_differences("PoolTransfer", parts.transfer, TRANSFER),
        *_differences("PoolTransferResult", parts.result, RESULT),
        *_update_differences(parts.updater),
    ]
    _refuse(parts.version, differences, what="storage")


def _refuse(version: str, differences: list[str], *, what: str) -> None:
    if version == VERSION and not differences:
        return
    shown = "; ".join(differences[:SHOWN_DIFFERENCES]) or f"its {what} has the interface that was tested"
    more = f"; and {len(differences) - SHOWN_DIFFERENCES} more" if len(differences) > SHOWN_DIFFERENCES else ""
    raise UnsupportedError(
        f"kvoffload was tested with SGLang {VERSION}, and this is {version}: {shown}{more}",
        remedy=f"install sglang=={VERSION}, or run without kvoffload",
    )


def _differences(name: str, kind: type, tested: Mapping[str, str]) -> Iterator[str]:
    for method, signature in tested.items():
        found = _signature(getattr(kind, method, None))
        if found != signature:
            yield f"{name}.{method} is {found or 'absent'}, tested was {signature}"
    abstract: frozenset[str] = getattr(kind, "__abstractmethods__", frozenset())
    for method in sorted(abstract - tested.keys()):
        yield f"{name}.{method} is new"


def _update_differences(updater: type) -> Iterator[str]:
    """An update that we do not hear of would leave pages of former weights in use."""
    name = updater.__name__
    yield from _differences(name, updater, {SELECT: "(self, selector)", CHECK: "(self, recv_req)", **UPDATER})
    for method in UPDATER:
        code = getattr(getattr(updater, method, None), "__code__", None)
        if code is not None and SELECT not in code.co_names:
            yield f"{name}.{method} does not call {SELECT}"
    for method in sorted(name for name in vars(updater) if name.startswith("update_weights") and name not in UPDATER):
        yield f"{name}.{method} is new"


def _signature(method: Any) -> str:
    """Names of parameters alone: notes of types are written in more than one way."""
    if not callable(method):
        return ""
    return f"({', '.join(inspect.signature(method).parameters)})"

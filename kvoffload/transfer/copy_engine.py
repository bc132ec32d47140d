"""The interface of every copy engine in Python: it takes plans, returns tickets, and reports later how each plan ended.
Nothing here blocks but `fence` and `close`."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.errors import NativeError, RegistrationError, StorageError, UnsupportedError
from kvoffload.kvspec.page_map import Int64s, PageMap
from kvoffload.units import milliseconds

if TYPE_CHECKING:
    import torch

CLOSE_TIMEOUT_S = 30.0
PLAN_LIMIT = 1024
"""Plans submitted and not yet polled; the next one is refused."""

CopyTicket = int
RunArrays = tuple[int, Int64s, Int64s, Int64s, Int64s, npt.NDArray[np.uint32]]
"""A group as the native core takes it: bytes of a record; of its runs base, stride, length, offset, allocation."""
StreamPoint = native.StreamPoint
"""A place in a stream's work. It belongs to the engine that marked it, and goes before that is closed."""
Marked = int | StreamPoint | None
"""The work that copies wait for: a stream up to their submission, by its handle, or up to the point where it was
marked."""
PlanArrays = tuple[bool, bool, npt.NDArray[np.uint32], npt.NDArray[np.uint32], npt.NDArray[np.uint64]]
"""A plan as the native core takes it: whether it loads and makes digests; of its items group, block, slot."""
RunDigests = npt.NDArray[np.uint64]
"""One row per item: the low and the high half of its record's digest sum, as `native.finish_digests` takes them."""


class CopyDirection(Enum):
    """Save: from the engine's pages to slots. Load: from slots to pages."""

    SAVE = "save"
    LOAD = "load"


@dataclass(frozen=True, kw_only=True, eq=False)
class CopyItems:
    """Parallel arrays: item i is block `block[i]` of group `group[i]`, with its record at address `slot[i]`.

    A slot is host memory of the group's `record_bytes` that stays valid until the ticket has been polled; slots that
    are saved to don't overlap.
    """

    group: npt.NDArray[np.integer]
    block: npt.NDArray[np.integer]
    slot: npt.NDArray[np.integer]

    def __post_init__(self) -> None:
        if not len(self.group) == len(self.block) == len(self.slot):
            raise UnsupportedError(
                f"{len(self.group)} groups, {len(self.block)} blocks and {len(self.slot)} slots make no items",
                remedy="give one of each for every item",
            )

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True, kw_only=True, eq=False)
class FinishedCopy:
    """`fault` is one line, empty if every byte is where it belongs. `digests`: if the plan wanted them and it is."""

    ticket: CopyTicket
    fault: str
    digests: RunDigests | None
    copied_s: float = 0.0
    """Seconds from the plan's first byte to its last, without the time it waited; 0: nothing moved, or it was not
    measured."""


class CopyEngine(Protocol):
    """Copies whole records in the background; safe to call from any thread.

    Plans that share bytes which one of them writes run as if one after the other, in the order of submission.
    """

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: Marked = None
    ) -> CopyTicket:
        """Queues a plan. `after`: what a compute stream was given before that comes before the copies.

        Blocks that are loaded must be distinct.
        """
        ...

    def mark(self, stream: int) -> StreamPoint:
        """`after` of a plan that is submitted later, and does not wait for what the stream is given meanwhile."""
        ...

    def poll(self) -> list[FinishedCopy]:
        """Plans that have ended since the last call, each told once."""
        ...

    def fence(self, timeout_s: float) -> bool:
        """Waits until every plan submitted before has ended; False if that takes longer."""
        ...

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Fails what has not begun, waits for what has. NativeError: a copy still runs, and its memory is kept."""
        ...


class NativeCopyEngine:
    """A CopyEngine of the native core over the pages of one map. Holds the engine's memory until it is closed."""

    def __init__(self, page_map: PageMap, core: native.CopyEngine) -> None:
        self._page_map = page_map
        self._core = core
        # Closes the engine before the interpreter ends: then the driver's library shuts down, even while a thread is in
        # it.
        self._at_exit = weakref.finalize(self, _close_quietly, core)

    def submit(
        self, direction: CopyDirection, items: CopyItems, *, has_digests: bool = False, after: Marked = None
    ) -> CopyTicket:
        """Queues a plan. BlockCountError: a block that does not exist, or the null block. UnsupportedError: the plan is
        none.

        NativeError: PLAN_LIMIT plans are under way, the engine is closed, or this is a fork of its process.
        """
        group, block = np.asarray(items.group, np.int64), np.asarray(items.block, np.int64)
        self._check(group, block)
        try:
            return self._hand_over(
                (
                    direction is CopyDirection.LOAD,
                    has_digests,
                    group.astype(np.uint32),
                    block.astype(np.uint32),
                    np.ascontiguousarray(items.slot, np.uint64),
                ),
                after,
            )
        except ValueError as fault:
            raise UnsupportedError(
                f"these blocks cannot be copied: {fault}",
                remedy="name registered groups, load each block from one record, give the addresses of whole records",
            ) from fault
        except RuntimeError as fault:
            raise _failed("a copy was not taken", fault) from fault

    def mark(self, stream: int) -> StreamPoint:
        """Refuses. UnsupportedError: this engine follows no streams."""
        raise UnsupportedError("copies of host memory follow no stream", remedy="submit when the memory is ready")

    def poll(self) -> list[FinishedCopy]:
        """NativeError in a fork of the engine's process."""
        try:
            finished = self._core.poll()
        except RuntimeError as fault:
            raise _failed("copies cannot be polled", fault) from fault
        return [
            FinishedCopy(
                ticket=ticket,
                fault=fault or "",
                digests=None if digests is None else _as_rows(digests),
                copied_s=copied_ns / 1e9,
            )
            for ticket, fault, digests, copied_ns in finished
        ]

    def fence(self, timeout_s: float) -> bool:
        """NativeError in a fork of the engine's process."""
        try:
            return self._core.fence(milliseconds(timeout_s))
        except RuntimeError as fault:
            raise _failed("copies cannot be waited for", fault) from fault

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Once it has returned nothing is held; what ended on the way can still be polled. May be called again."""
        try:
            self._core.close(milliseconds(timeout_s))
        except RuntimeError as fault:
            raise _failed("the copy engine was not closed", fault) from fault

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hand_over(self, plan: PlanArrays, after: Marked) -> CopyTicket:
        """Hands a plan to the core. ValueError, RuntimeError: the core's."""
        return self._core.submit(*plan, after if isinstance(after, int) else None)

    def _check(self, group: Int64s, block: Int64s) -> None:
        if len(group) == 0:
            return
        low, high = int(group.min()), int(group.max())
        if low < 0 or high >= len(self._page_map.groups):
            raise UnsupportedError(
                f"group {low if low < 0 else high} is not one of the {len(self._page_map.groups)} registered",
                remedy="name registered groups",
            )
        for number in range(low, high + 1):
            self._page_map.check_blocks(block if low == high else block[group == number], group=number)


def list_runs(page_map: PageMap, addresses: Mapping[str, int]) -> list[RunArrays]:
    """Every group's runs, with the addresses that allocations begin at."""
    starts = np.array([addresses.get(allocation.name, 0) for allocation in page_map.allocations], np.int64)
    groups = []
    for pages in page_map.groups:
        missing = np.flatnonzero(starts[pages.allocation] == 0)
        if len(missing):
            name = page_map.allocations[int(pages.allocation[missing[0]])].name
            raise RegistrationError(
                f"group {pages.name}: allocation {name} is not registered",
                remedy="register the KV caches again after they were released",
            )
        base = starts[pages.allocation] + pages.base
        allocation = pages.allocation.astype(np.uint32)
        groups.append((pages.record_bytes, base, pages.stride, pages.length, pages.record_offset, allocation))
    return groups


def find_addresses(page_map: PageMap, memory: Mapping[str, torch.Tensor | int]) -> dict[str, int]:
    """Returns where allocations begin: flat uint8 tensors are checked, a number is taken as the address that it is."""
    import torch

    addresses = {}
    for allocation in page_map.allocations:
        flat = memory.get(allocation.name)
        if flat is None:
            continue
        if isinstance(flat, int):
            addresses[allocation.name] = flat
            continue
        is_flat = flat.dtype == torch.uint8 and flat.dim() == 1 and flat.is_contiguous()
        if not is_flat or flat.numel() < allocation.size_bytes:
            raise StorageError(
                f"allocation {allocation.name}: {flat.numel()} elements of {flat.dtype}, "
                f"{flat.dim()} dimensions, expected {allocation.size_bytes} flat uint8",
                remedy="give the registration's memory",
            )
        addresses[allocation.name] = flat.data_ptr()
    return addresses


def _as_rows(digests: bytes) -> RunDigests:
    return np.frombuffer(digests, np.uint64).reshape(-1, 2)


def _close_quietly(core: native.CopyEngine) -> None:
    with contextlib.suppress(RuntimeError):
        core.close(milliseconds(CLOSE_TIMEOUT_S))


def _failed(what: str, fault: RuntimeError) -> NativeError:
    return NativeError(f"{what}: {fault}")

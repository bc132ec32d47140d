"""The copy engine of NVIDIA GPUs: the driver alone, on streams of its own; no torch in the native core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvoffload import native
from kvoffload.errors import NativeError, StorageError, UnsupportedError
from kvoffload.kvspec.page_map import PageMap
from kvoffload.transfer.copy_engine import (
    PLAN_LIMIT,
    CopyDirection,
    CopyTicket,
    Marked,
    NativeCopyEngine,
    PlanArrays,
    StreamPoint,
    find_addresses,
    list_runs,
)
from kvoffload.transfer.copy_ways import WayTable
from kvoffload.units import milliseconds

if TYPE_CHECKING:
    import torch

REGISTRATION_REMEDIES = {
    "ALREADY_REGISTERED": "give kvoffload memory that nothing else in this process has registered",
    "OUT_OF_MEMORY": "look for NVRM lines in `dmesg` and at free memory of the machine and its cgroup; "
    "the driver does not go by `ulimit -l`",
    "": "look for NVRM lines in `dmesg`",
}
"""Remedies by a part of the driver's name for the fault; the empty name fits every other fault.

NVIDIA's kernel module pins pages by itself and never asks for RLIMIT_MEMLOCK (os_lock_user_pages in its published
source). What it needs is the pages, which a cgroup may refuse, and 16 bytes of kernel memory in a row for each page
of one call: more than 512 GiB at once fail since R580 (vLLM issue 51080), which pieces of 16 MiB are far from.
"""


@dataclass(frozen=True, kw_only=True)
class HostRegistration:
    """How far host memory is known to the driver. What is not goes by way of a pinned buffer, more slowly."""

    asked_bytes: int
    registered_bytes: int
    is_done: bool
    """Nothing is waiting to be registered."""
    is_leaving: bool
    """Memory that was removed is still known to the driver, and must stay where it is."""
    problem: str
    """Why some memory stays unregistered, and what to do; empty: nothing failed."""


class CudaEngine(NativeCopyEngine):
    """`memory` maps allocation names to flat uint8 tensors of one GPU, as `Registration.memory` gives them, or to
    addresses, whose memory the caller keeps until the engine is closed; then `device` says which GPU.

    Opening takes the GPU's primary context, which torch uses too, and all device memory the engine will ever have
    (about 36 MiB). `library`: another driver than the machine's.
    """

    _core: native.CudaCopyEngine

    def __init__(
        self,
        page_map: PageMap,
        memory: Mapping[str, torch.Tensor | int],
        *,
        device: int | None = None,
        plan_limit: int = PLAN_LIMIT,
        library: str | None = None,
    ) -> None:
        tensors = {name: flat for name, flat in memory.items() if not isinstance(flat, int)}
        runs = list_runs(page_map, find_addresses(page_map, memory))
        try:
            # The core keeps the tensors, so that nothing a copy still touches goes with this object.
            core = native.create_cuda_engine(
                page_map.num_blocks, runs, list(tensors.values()), find_device(tensors, device), plan_limit, library
            )
        except (TypeError, ValueError) as fault:
            raise UnsupportedError(f"no CUDA engine can be made: {fault}", remedy="check device and pages") from fault
        except RuntimeError as fault:
            raise NativeError(
                f"no CUDA engine can be made: {fault}", remedy="look whether nvidia-smi sees the GPU"
            ) from fault
        super().__init__(page_map, core)

    @property
    def registration(self) -> HostRegistration:
        asked, registered, is_done, is_leaving, problem = self._core.registration()
        remedy = next(text for name, text in REGISTRATION_REMEDIES.items() if name in problem)
        return HostRegistration(
            asked_bytes=asked,
            registered_bytes=registered,
            is_done=is_done,
            is_leaving=is_leaving,
            problem=f"{problem}; {remedy}" if problem else "",
        )

    @property
    def kernel_problem(self) -> str:
        """Why every plan goes by batch, whatever the table says; empty: it does not."""
        return self._core.kernel_problem()

    @property
    def is_lost(self) -> bool:
        """A fault of the whole device: every plan fails or is refused."""
        return self._core.is_lost()

    def add_host_range(self, address: int, size_bytes: int) -> None:
        """Slots in this memory are copied directly, each piece from when it is registered, which goes on in the
        background. The memory stays until the engine is closed, or until it is removed and nothing leaves any more.
        """
        try:
            self._core.add_host_range(address, size_bytes)
        except ValueError as fault:
            raise UnsupportedError(
                f"{size_bytes} bytes at {address:#x} cannot be registered: {fault}", remedy="give a mapped range"
            ) from fault
        except RuntimeError as fault:
            raise NativeError(f"host memory was not taken: {fault}") from fault

    def remove_host_range(self, address: int, size_bytes: int) -> None:
        """Undoes `add_host_range`, and waits for nothing: what copies still use leaves when they have ended."""
        try:
            self._core.remove_host_range(address, size_bytes)
        except ValueError as fault:
            raise UnsupportedError(
                f"{size_bytes} bytes at {address:#x} cannot be removed: {fault}", remedy="remove what was added"
            ) from fault
        except RuntimeError as fault:
            raise NativeError(f"host memory was not removed: {fault}") from fault

    def wait_registered(self, size_bytes: int, timeout_s: float) -> None:
        """Until so much is registered, or no more is going to be, or the time is over."""
        self._core.wait_registered(size_bytes, milliseconds(timeout_s))

    def mark(self, stream: int) -> StreamPoint:
        """Marks what a stream was given so far. NativeError: the stream is being captured, or the device is lost."""
        try:
            return self._core.mark(stream)
        except RuntimeError as fault:
            raise NativeError(f"a stream was not marked: {fault}") from fault

    def set_ways(self, table: WayTable) -> None:
        """Sets the ways of plans that begin from now on."""
        self._core.set_ways(
            [(rule.direction is CopyDirection.LOAD, rule.run_bytes, rule.runs, rule.way.value) for rule in table]
        )

    def make_wait(self, stream: int, ticket: CopyTicket, timeout_s: float) -> None:
        """Makes all later work of `stream` wait for the plan. Blocks until the plan is with the device.

        NativeError: it is not within `timeout_s`, or it has failed.
        """
        try:
            self._core.make_wait(stream, ticket, milliseconds(timeout_s))
        except ValueError as fault:
            raise UnsupportedError(f"nothing can wait for this: {fault}", remedy="name a ticket of submit") from fault
        except RuntimeError as fault:
            raise NativeError(f"a stream cannot wait for this copy: {fault}") from fault

    def _hand_over(self, plan: PlanArrays, after: Marked) -> CopyTicket:
        if isinstance(after, StreamPoint):
            return self._core.submit_after(*plan, after)
        return super()._hand_over(plan, after)


def find_device(tensors: Mapping[str, torch.Tensor], device: int | None) -> int:
    """Returns the one GPU of all tensors, or the one named. StorageError: there are several, or it is none."""
    found = {name: flat.device for name, flat in tensors.items()}
    for name, other in found.items():
        if other.type != "cuda":
            raise StorageError(
                f"allocation {name} is on {other}, which the CUDA engine does not copy from",
                remedy="use the host engine",
            )
    indices = {0 if other.index is None else other.index for other in found.values()} | (
        set() if device is None else {device}
    )
    if len(indices) > 1:
        raise StorageError(
            f"the memory lies on several GPUs: {', '.join(map(str, sorted(indices)))}",
            remedy="open an engine for each GPU",
        )
    return indices.pop() if indices else 0

"""An engine's KV tensors while we use them (rule 5): checked and proved when they come, let go of when they leave.

From vLLM #39224: the clean-up after profiling released KV tensors but not the scale views over them, found by chains of
attribute tests. Here views are declared by name; they come with their pages, and nothing is held after `unregister`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from kvoffload.errors import BlockAlignmentError, OverlapError, RegistrationError, StrideError, UnknownLayerError
from kvoffload.kvspec.blocks import TensorFacts, check_storage, check_tensor, read_facts
from kvoffload.kvspec.completeness import CompletenessReport
from kvoffload.kvspec.geometry import KVGeometry, ScaleView
from kvoffload.kvspec.group import GroupSpec
from kvoffload.kvspec.layout import tensor_dims
from kvoffload.kvspec.page_map import PageMap, build_page_map
from kvoffload.kvspec.placement import BLOCK, BYTE, Dim
from kvoffload.kvspec.proof import prove_complete
from kvoffload.kvspec.spec import is_scale_part

if TYPE_CHECKING:
    import torch

Memory = Mapping[str, "torch.Tensor"]
_Value = TypeVar("_Value")
SelfTest = Callable[[PageMap, Memory], None]


class Closeable(Protocol):
    """A holder of engine memory besides the registration, such as a copy engine."""

    def close(self) -> None: ...


class Registration:
    """One engine's KV caches, from register to unregister, as often as the engine likes. Used by one thread.

    The memory is held by `memory`, and by objects that were built on it and `attach`ed. Nothing else may keep either.
    """

    def __init__(self) -> None:
        self._geometry: KVGeometry | None = None
        self._page_map: PageMap | None = None
        self._report: CompletenessReport | None = None
        self._memory: dict[str, torch.Tensor] = {}
        self._users = ExitStack()

    @property
    def is_registered(self) -> bool:
        return self._geometry is not None

    @property
    def geometry(self) -> KVGeometry:
        return self._present(self._geometry)

    @property
    def page_map(self) -> PageMap:
        return self._present(self._page_map)

    @property
    def report(self) -> CompletenessReport:
        return self._present(self._report)

    @property
    def memory(self) -> Memory:
        """Allocation names to flat uint8 tensors over the engine's own memory. Don't keep them: `attach` what does."""
        self._present(self._geometry)
        return MappingProxyType(self._memory)

    def register(
        self,
        geometry: KVGeometry,
        tensors: Memory,
        *,
        scale_views: Memory | None = None,
        self_test: SelfTest | None = None,
    ) -> CompletenessReport:
        """Checks every tensor against the geometry, proves that nothing is forgotten, then holds the memory.

        `tensors`: one per placement and optionally per alias or excluded layer, by their declared names. `scale_views`:
        the tensors of scales, which lie outside the pages or are views of scales inside them. `self_test` is called
        with the page map and the memory, as a copy engine needs them. If anything fails, nothing is held afterwards.
        """
        if self.is_registered:
            raise RegistrationError("KV caches are registered already", remedy="unregister the old ones first")
        report = prove_complete(geometry)
        check_alignment(geometry.groups, hash_block_size=geometry.hash_block_size)
        memory = _check_tensors(geometry, tensors, scale_views or {})
        page_map = build_page_map(geometry)
        if self_test is not None:
            self_test(page_map, MappingProxyType(memory))
        self._geometry, self._page_map, self._report, self._memory = geometry, page_map, report, memory
        return report

    def attach(self, user: Closeable) -> None:
        """Something that holds `memory` and is closed before the memory is let go of, last attached first."""
        self._present(self._geometry)
        self._users.callback(user.close)

    def unregister(self) -> tuple[str, ...]:
        """Lets go of everything; without a registration it does nothing.

        Returns the allocations that something of ours still holds (a user that was not attached): empty is the rule,
        and a caller whose engine is about to free the memory reports anything else.
        """
        watched = {name: weakref.ref(flat) for name, flat in self._memory.items()}
        try:
            self._users.close()
        finally:
            # The engine gets its memory back even if closing a user failed.
            self._geometry = self._page_map = self._report = None
            # The mapping is emptied in place: a caller that kept it from `memory` must not keep its tensors.
            self._memory.clear()
        return tuple(name for name, flat in watched.items() if flat() is not None)

    @staticmethod
    def _present(value: _Value | None) -> _Value:
        if value is None:
            raise RegistrationError("no KV caches are registered", remedy="register them first")
        return value


def check_alignment(groups: Sequence[GroupSpec], *, hash_block_size: int) -> None:
    """BlockAlignmentError for the first stored group whose blocks are not whole hash blocks (rule 6).

    A block's key is the hash of its last tokens. The error says what to change, because the cause is usually a setting
    far away (vLLM #38554).
    """
    if hash_block_size < 1:
        raise BlockAlignmentError(
            f"hash_block_size is {hash_block_size}",
            remedy="give the tokens per block hash",
            hash_block_size=hash_block_size,
        )
    is_hybrid = any(group.has_recurrent for group in groups)
    for group in groups:
        # Blocks that are not stored have no keys.
        if not group.is_stored or group.block_size % hash_block_size == 0:
            continue
        remedy = f"set a block size that is a multiple of {hash_block_size}"
        if is_hybrid:
            remedy = (
                "enable prefix caching (vLLM: --enable-prefix-caching): for hybrid models (recurrent layers and "
                "attention) the engine then aligns block sizes"
            )
        raise BlockAlignmentError(
            f"group {group.name}: block size {group.block_size} is not a multiple of hash block size {hash_block_size}",
            remedy=remedy,
            group=group.name,
            block_size=group.block_size,
            hash_block_size=hash_block_size,
        )


def _check_tensors(geometry: KVGeometry, tensors: Memory, scale_views: Memory) -> dict[str, torch.Tensor]:
    """Flat views of all allocations, after every given tensor was found where the geometry has it."""
    _refuse_unknown(geometry, tensors, scale_views)
    addresses: dict[str, int] = {}
    memory: dict[str, torch.Tensor] = {}
    allocations = {allocation.name: allocation for allocation in geometry.allocations}
    for placement in geometry.placements:
        tensor = (scale_views if is_scale_part(placement.part) else tensors).get(placement.tensor)
        if tensor is None:
            if geometry.layers[placement.layer].excluded:
                continue
            raise RegistrationError(
                f"{placement.label}: its tensor {placement.tensor} was not given",
                remedy="register every declared tensor, scale tensors included",
                tensor=placement.tensor,
            )
        facts, allocation = read_facts(placement.tensor, tensor), allocations[placement.allocation]
        address = addresses.setdefault(allocation.name, facts.storage_address)
        _check_same_storage(facts, allocation.name, address)
        _check_other_storages(allocation.name, addresses)
        check_storage(facts, allocation)
        num_blocks = geometry.count_blocks(placement.layer)
        check_tensor(facts, placement, num_blocks=num_blocks, allocation_address=address)
        if allocation.name not in memory:
            memory[allocation.name] = _flatten(tensor, allocation.size_bytes)
    for layer in geometry.layers.values():
        targets = geometry.placements_of[layer.alias_of] if layer.alias_of else ()
        if layer.name in tensors and targets and targets[0].tensor in tensors:
            target = targets[0].tensor
            _check_alias(read_facts(layer.name, tensors[layer.name]), read_facts(target, tensors[target]))
    for view in geometry.scale_views:
        _check_scale_view(geometry, view, read_facts(view.name, scale_views[view.name]), addresses)
    return memory


def _refuse_unknown(geometry: KVGeometry, tensors: Memory, scale_views: Memory) -> None:
    """Names on both sides agree: a tensor that nothing describes would be forgotten by every save."""
    inline = {view.name for view in geometry.scale_views}
    beside = {placement.tensor for placement in geometry.placements if is_scale_part(placement.part)}
    pages = {placement.tensor for placement in geometry.placements} - beside
    described = pages | {layer.name for layer in geometry.layers.values() if not layer.is_stored}
    for kind, given, known in (("tensor", tensors, described), ("scale view", scale_views, inline | beside)):
        unknown = sorted(set(given) - known)
        if unknown:
            raise UnknownLayerError(
                f"{kind} {unknown[0]} was given, which nothing describes ({len(unknown)} such)",
                remedy="describe its layer, or declare the layer excluded",
                tensor=unknown[0],
            )
    missing = sorted(inline - set(scale_views))
    if missing:
        raise RegistrationError(
            f"scale view {missing[0]} is declared and was not given",
            remedy="create scale views before registering: a view made later may overwrite restored scales",
            tensor=missing[0],
        )


def _check_scale_view(geometry: KVGeometry, view: ScaleView, facts: TensorFacts, addresses: Mapping[str, int]) -> None:
    """A view over inline scales lies inside its layer's pages, block by block."""
    pages = [
        part
        for part in geometry.placements_of[view.layer]
        if not is_scale_part(part.part) and addresses[part.allocation] == facts.storage_address
    ]
    if not pages:
        raise _misplaced_view(view, facts)
    dims = tensor_dims(view.dims, shape=facts.shape, strides=facts.strides, itemsize=1)
    block = next(dim for dim in dims if dim.name == BLOCK)
    entries = geometry.count_blocks(view.layer) * pages[0].kernel_blocks
    inner = [dim for dim in dims if dim.name not in (BLOCK, BYTE)]
    inner += [Dim("kernel", pages[0].kernel_blocks, block.stride)]
    starts = np.array([facts.address - facts.storage_address], dtype=np.int64)
    for dim in inner:
        starts = np.add.outer(starts, np.arange(dim.size, dtype=np.int64) * dim.stride).reshape(-1)
    bases, ends = np.array(
        sorted((run.base, run.base + run.length) for page in pages for run in page.runs), dtype=np.int64
    ).T
    home = np.searchsorted(bases, starts, side="right") - 1
    inside = (home >= 0) & (starts + facts.itemsize <= ends[home])
    right_stride = block.stride * pages[0].kernel_blocks == pages[0].runs[0].stride or entries == 1
    if block.size != entries or not right_stride or not inside.all():
        raise _misplaced_view(view, facts)


def _misplaced_view(view: ScaleView, facts: TensorFacts) -> StrideError:
    return StrideError(
        f"scale view {view.name} of shape {facts.shape} is not inside the pages of {view.layer}, block by block",
        remedy="scales inside pages have the pages' blocks and strides; scales elsewhere need a placement",
        tensor=view.name,
        layer=view.layer,
    )


def _check_alias(facts: TensorFacts, target: TensorFacts) -> None:
    if facts.address != target.address:
        raise StrideError(
            f"tensor {facts.name} is declared to share the pages of {target.name} and starts elsewhere",
            remedy="place the layer, if it has pages of its own",
            tensor=facts.name,
        )


def _check_same_storage(facts: TensorFacts, allocation: str, address: int) -> None:
    if facts.storage_address != address:
        raise StrideError(
            f"tensor {facts.name} is not in the storage that other tensors of allocation {allocation} are in",
            remedy="declare one allocation per storage",
            tensor=facts.name,
        )


def _check_other_storages(allocation: str, addresses: Mapping[str, int]) -> None:
    """The proof goes allocation by allocation: one storage under two names would escape it."""
    twin = next((name for name in addresses if name != allocation and addresses[name] == addresses[allocation]), None)
    if twin is not None:
        raise OverlapError(
            f"allocations {twin} and {allocation} are the same storage",
            remedy="declare one allocation per storage, with offsets inside it",
            claimants=(twin, allocation),
        )


def _flatten(tensor: torch.Tensor, size_bytes: int) -> torch.Tensor:
    """The allocation's bytes as a tensor of our own over the engine's storage."""
    import torch

    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), 0, (size_bytes,), (1,))

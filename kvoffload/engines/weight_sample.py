"""A bounded sample of tensors, as they lie in memory: each one's digest, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from kvoffload.keys.canonical import encode_canonical

SAMPLED_ELEMENTS = 4096
"""How many elements of a tensor are read at most; of a smaller one all are."""
_SEED = 0x6B76_6F66_666C_6F61
AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By their size: what an element means does not matter, and not every device can gather every type."""
_TAG = b"kvoffload weights 1\n"


@dataclass(frozen=True, kw_only=True)
class WeightSample:
    """`digests`: by name, of a tensor's name, shape, type and sampled bytes."""

    digests: Mapping[str, bytes]
    sampled: int
    """Elements that were read."""
    elements: int
    """Number of elements that there are."""

    def digest(self, names: Iterable[str] | None = None) -> bytes:
        """Of all tensors, or of these, whatever order they came in."""
        chosen = sorted(self.digests if names is None else names)
        return sha256(_TAG + encode_canonical([[name, self.digests[name]] for name in chosen])).digest()


def pick_positions(elements: int, limit: int = SAMPLED_ELEMENTS) -> npt.NDArray[np.int64]:
    """One of each of `limit` equal stretches, ascending: the same ones for as many elements, in every process."""
    if elements <= limit:
        return np.arange(elements, dtype=np.int64)
    edges = np.array([elements * part // limit for part in range(limit + 1)], np.int64)
    widths = np.diff(edges)
    return edges[:-1] + (_scramble(np.arange(limit, dtype=np.uint64)) % widths.astype(np.uint64)).astype(np.int64)


def sample_tensors(tensors: Iterable[tuple[str, torch.Tensor]], limit: int = SAMPLED_ELEMENTS) -> WeightSample:
    """Reads each tensor where it lies, and copies what was read to the host once for each device.

    Nothing is changed. Raises what torch does where a tensor cannot be read, and ValueError for a kind of tensor that
    cannot be read here.
    """
    offsets: dict[tuple[object, ...], torch.Tensor] = {}
    headers: list[tuple[str, bytes]] = []
    gathered: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    elements = 0
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, tensor in flatten_tensors(tensors):
            elements += tensor.numel()
            headers.append((name, encode_canonical([name, list(tensor.shape), str(tensor.dtype)])))
            if tensor.numel() and not tensor.is_meta:
                gathered.setdefault(tensor.device, []).append((name, _gather(tensor, limit, offsets)))
        taken = {name: data for pieces in gathered.values() for name, data in _copy_to_host(pieces)}
    if len({name for name, _ in headers}) != len(headers):
        raise ValueError("two tensors have one name")
    return WeightSample(
        digests={name: sha256(header + taken.get(name, b"")).digest() for name, header in headers},
        sampled=sum(min(piece.numel(), limit) for pieces in gathered.values() for _, piece in pieces),
        elements=elements,
    )


def flatten_tensors(tensors: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Some keep their bytes in tensors of their own, a value and its scale, say."""
    for name, tensor in tensors:
        partitions = getattr(tensor, "partitions", None)
        if isinstance(partitions, Mapping):
            yield from flatten_tensors((f"{name}.{part}", inner) for part, inner in partitions.items())
        elif is_traceable_wrapper_subclass(tensor):
            parts = tensor.__tensor_flatten__()[0]
            yield from flatten_tensors((f"{name}.{part}", getattr(tensor, part)) for part in parts)
        else:
            yield name, tensor


def _gather(tensor: torch.Tensor, limit: int, offsets: dict[tuple[object, ...], torch.Tensor]) -> torch.Tensor:
    """The sampled elements as integers, on the tensor's device; never a copy of the whole tensor."""
    if tensor.layout != torch.strided or tensor.element_size() not in AS_INTEGERS:
        raise ValueError(f"a tensor of {tensor.dtype} in layout {tensor.layout}")
    shape, strides = tuple(tensor.shape), tensor.stride()
    key = (shape, strides, tensor.device)
    if key not in offsets:
        positions = np.unravel_index(pick_positions(tensor.numel(), limit), shape) if shape else ()
        found = sum((at * stride for at, stride in zip(positions, strides, strict=True)), np.zeros(1, np.int64))
        offsets[key] = torch.from_numpy(np.asarray(found, np.int64)).to(tensor.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    line = torch.as_strided(tensor.detach(), (extent,), (1,), tensor.storage_offset())
    return line.view(AS_INTEGERS[tensor.element_size()])[offsets[key]]


def _copy_to_host(pieces: list[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, bytes]]:
    data = torch.cat([piece.view(torch.uint8) for _, piece in pieces]).cpu().numpy().tobytes()
    at = 0
    for name, piece in pieces:
        size = piece.numel() * piece.element_size()
        yield name, data[at : at + size]
        at += size


def _scramble(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64: numpy's own generators may give other numbers in another version."""
    with np.errstate(over="ignore"):
        mixed = values * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(_SEED)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return mixed ^ (mixed >> np.uint64(31))

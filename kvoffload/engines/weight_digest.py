"""A digest of every byte of tensors, where a sample of them would not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import TYPE_CHECKING

import torch

from kvoffload.engines.weight_sample import flatten_tensors
from kvoffload.keys.canonical import encode_canonical
from kvoffload.native import digest_run

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES = 64 << 20
"""About as much is copied at once of a tensor that lies on a device, or not in one piece."""
_TAG = b"kvoffload whole weights 1\n"
_RUN_BYTES = 32


def digest_tensors(tensors: Iterable[tuple[str, torch.Tensor]]) -> bytes:
    """Returns a digest of names, shapes, types and all bytes, at about the speed of memory. Tensors are taken in any
    order.

    Raises what torch does where a tensor cannot be read, and ValueError for a kind of tensor that cannot be read here.
    """
    digests = {}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, tensor in flatten_tensors(tensors):
            if name in digests:
                raise ValueError("two tensors have one name")
            digests[name] = _digest(name, tensor.detach())
    return sha256(_TAG + encode_canonical([[name, digests[name]] for name in sorted(digests)])).digest()


def _digest(name: str, tensor: torch.Tensor) -> bytes:
    if tensor.layout != torch.strided or tensor.is_meta:
        raise ValueError(f"{name} has no bytes of its own")
    digest = sha256(encode_canonical([name, list(tensor.shape), str(tensor.dtype)]))
    for piece in _cut(tensor):
        digest.update(digest_run(piece).to_bytes(_RUN_BYTES, "little"))
    return digest.digest()


def _cut(tensor: torch.Tensor) -> Iterator[Buffer]:
    """Row by row of its first dimension, so that equal tensors have equal pieces wherever they lie."""
    if not tensor.numel():
        return
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    row_bytes = rows[0].numel() * rows.element_size()
    for piece in torch.split(rows, max(1, PIECE_BYTES // row_bytes)):
        yield piece.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data

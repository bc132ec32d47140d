"""Every byte of every tensor is in the digest, and nothing of how they lie in memory."""

from __future__ import annotations

import pytest
import torch

from kvoffload.engines import weight_digest
from kvoffload.engines.weight_digest import digest_tensors

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_change_of_one_element_shows(dtype: torch.dtype) -> None:
    tensor = torch.zeros(5, 7, 3).to(dtype)
    digests = {digest_tensors([("one", tensor)])}
    for at in range(tensor.numel()):
        changed = tensor.clone()
        changed.view(-1)[at] = 1
        digests.add(digest_tensors([("one", changed)]))
    assert len(digests) == 1 + tensor.numel()


def test_names_shapes_and_types_show_and_their_order_does_not() -> None:
    zeros = torch.zeros(4, 4)
    kinds = [zeros, zeros.view(2, 8), zeros.to(torch.int32), zeros[:0], zeros[:1], torch.zeros(())]
    assert len({digest_tensors([(name, kind)]) for name in ("one", "two") for kind in kinds}) == 12
    pair = [("one", zeros), ("two", zeros + 1)]
    assert digest_tensors(pair) == digest_tensors(reversed(pair))
    assert digest_tensors(pair) != digest_tensors([("one", zeros + 1), ("two", zeros)])


def test_equal_tensors_are_equal_wherever_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(12, 10)
    strided = torch.zeros(24, 30)[::2, 5:25:2]
    strided.copy_(tensor)
    transposed = tensor.t().contiguous().t()
    assert len({digest_tensors([("one", one)]) for one in (tensor, strided, transposed)}) == 1
    whole = digest_tensors([("one", tensor)])
    monkeypatch.setattr(weight_digest, "PIECE_BYTES", 100)
    pieces = {digest_tensors([("one", one)]) for one in (tensor, strided, transposed)}
    assert len(pieces) == 1
    assert pieces != {whole}
    strided[11, 9] += 1
    assert digest_tensors([("one", strided)]) not in pieces


def test_what_has_no_bytes_and_what_has_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match="one has no bytes of its own"):
        digest_tensors([("one", torch.zeros(3, device="meta"))])
    with pytest.raises(ValueError, match="one has no bytes of its own"):
        digest_tensors([("one", torch.eye(3).to_sparse())])
    with pytest.raises(ValueError, match="one name"):
        digest_tensors([("one", torch.zeros(3)), ("one", torch.zeros(3))])

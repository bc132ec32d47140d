"""A host pool's pages: every byte is placed, in each layout, where SGLang says; what is not known is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvoffload.errors import StorageError, UnsupportedError
from kvoffload.kvspec import Registration, prove_complete
from kvoffload.sglang.host_pools import LAYOUTS, describe_host_pool
from kvoffload.sglang.pools import describe_pool
from tests.kit.sglang.host_pools import PAGES, HostPool, MHATokenToKVPoolHost, MLATokenToKVPoolHost, fill_host
from tests.kit.sglang.pools import PAGE, MHATokenToKVPool, MLATokenToKVPool, buffers_of, rows_of
from tests.kit.transfer.plain_copy import PlainCopy

KINDS = {"mha": (MHATokenToKVPoolHost, MHATokenToKVPool), "mla": (MLATokenToKVPoolHost, MLATokenToKVPool)}


def make_record(pages: Any, block: int) -> bytes:
    registration = Registration()
    registration.register(pages.geometry, pages.tensors)
    record = torch.empty((1, registration.page_map.groups[0].record_bytes), dtype=torch.uint8)
    PlainCopy(registration.page_map, registration.memory).save(0, [block], record)
    return record.numpy().tobytes()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_page_makes_the_same_record_as_the_page_that_it_mirrors(kind: str, layout: str) -> None:
    """Whichever layout; so that both doors find each other's pages."""
    make_host, make_pool = KINDS[kind]
    host, pool = make_host(layout, start_layer=3), make_pool(start_layer=3)
    fill_host(host, 1)
    pages = describe_host_pool(host, page_size=PAGE)
    assert sum(prove_complete(pages.geometry).claims.values()) == host.kv_buffer.untyped_storage().nbytes()
    assert pages.geometry.num_blocks == PAGES
    mirrored = describe_pool(pool, page_size=PAGE)
    assert pages.geometry.describe() == mirrored.geometry.describe()
    for buffer, rows in zip(buffers_of(pool), host.rows(0, 5).flatten(0, 1), strict=True):
        buffer[rows_of(1, 2)] = rows
    # Any page may be a request's: there is none for padding.
    assert make_record(pages, 0) == make_record(mirrored, 1)
    assert make_record(pages, 5) == make_record(mirrored, 2)


def test_what_lies_behind_the_buffer_is_excluded_by_name() -> None:
    host = MHATokenToKVPoolHost("page_first_direct")
    size = host.kv_buffer.numel()
    host.kv_buffer = torch.zeros(size + 100, dtype=host.dtype)[:size].view(host.kv_buffer.shape)
    geometry = describe_host_pool(host, page_size=PAGE).geometry
    assert [(one.name, one.length) for one in geometry.exclusions] == [("rounding", 200)]
    prove_complete(geometry)


class OtherPool(MHATokenToKVPoolHost):
    """Derived from one that is served."""


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("layout", "page_head", "layout page_head"),
        ("page_size", 8, "pages of 8 tokens"),
        ("dtype", torch.uint8, "torch.uint8"),
        ("dcp_size", 2, "context parallel"),
        ("storage_format_tag", "fp8", "format fp8"),
        ("stores_page_envelope", True, "envelopes"),
        ("target_layer_num", 1, "draft model"),
        ("v_head_dim", 16, "another size"),
        ("kv_buffer", None, "no buffer"),
    ],
)
def test_a_pool_that_is_otherwise_than_was_tested_is_refused(name: str, value: object, told: str) -> None:
    host = MHATokenToKVPoolHost("page_first_direct")
    setattr(host, name, value)
    with pytest.raises(UnsupportedError, match=told):
        describe_host_pool(host, page_size=PAGE)


def test_a_pool_of_another_class_is_refused_by_its_name() -> None:
    with pytest.raises(UnsupportedError, match=r"test_host_pools\.OtherPool is not served"):
        describe_host_pool(OtherPool("layer_first"), page_size=PAGE)


def test_a_page_that_lies_elsewhere_than_sglang_says_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    host = MHATokenToKVPoolHost("page_first_direct")
    starts, sizes = host.get_page_buffer_meta(torch.arange(PAGE * (PAGES - 1), PAGE * PAGES))
    for wrong in (np.array(starts) - 2, np.array(starts)[:1]):
        monkeypatch.setattr(HostPool, "get_page_buffer_meta", lambda *_, told=wrong: (told, sizes[: len(told)]))
        with pytest.raises(StorageError, match="lies elsewhere"):
            describe_host_pool(host, page_size=PAGE)

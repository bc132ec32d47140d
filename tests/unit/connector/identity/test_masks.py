"""Masks keep blocks apart whose engine hashes are equal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvoffload.connector.common.block_chain import NO_MASK, combine_masks
from kvoffload.connector.common.request_settings import RequestSettings
from kvoffload.connector.identity.adapters import AdapterContents, mask_of
from kvoffload.connector.identity.masks import RequestMasks

PLAIN = RequestSettings()
TENANT = RequestSettings(tenant="a")


def ask(masks: RequestMasks, settings: RequestSettings = PLAIN, *, adapter: object = None) -> bytes | None:
    request: Any = SimpleNamespace(lora_request=adapter)
    return masks.find(request, settings)


@pytest.fixture
def masks() -> Iterator[RequestMasks]:
    with closing(RequestMasks()) as one:
        yield one


def test_a_request_without_wishes_has_the_engines_own_names(masks: RequestMasks) -> None:
    assert ask(masks) == NO_MASK


def test_tenants_have_names_of_their_own_in_every_engine(masks: RequestMasks) -> None:
    names = {ask(masks), ask(masks, TENANT), ask(masks, RequestSettings(tenant="b"))}
    assert len(names) == 3
    assert ask(RequestMasks(), TENANT) == ask(masks, TENANT)


def test_new_weights_share_nothing_with_the_old_ones_or_with_any_other_engine(masks: RequestMasks) -> None:
    before = {ask(masks), ask(masks, TENANT)}
    masks.renew()
    after = {ask(masks), ask(masks, TENANT)}
    other = RequestMasks()
    other.renew()
    assert len(before | after | {ask(other)}) == 5
    assert ask(masks) == masks.generation


def test_weights_that_turn_out_to_be_the_same_have_the_names_of_before_the_last_reset(masks: RequestMasks) -> None:
    masks.renew()
    first = ask(masks), ask(masks, TENANT)
    masks.renew()
    assert not {*first} & {ask(masks), ask(masks, TENANT)}
    masks.take_back()
    assert (ask(masks), ask(masks, TENANT)) == first


def test_an_adapters_content_is_part_of_the_name(masks: RequestMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    content: dict[str, bytes | None] = {"one": b"1" * 32, "two": b"2" * 32, "not known": None}
    monkeypatch.setattr(AdapterContents, "find", lambda self, adapter: content[adapter])
    assert ask(masks, adapter="one") == mask_of(b"1" * 32)
    assert ask(masks, adapter="two") == mask_of(b"2" * 32)
    assert ask(masks, adapter="not known") is None
    both = ask(masks, TENANT, adapter="one")
    tenant = ask(masks, TENANT)
    assert tenant is not None
    assert both == combine_masks(mask_of(b"1" * 32), tenant)

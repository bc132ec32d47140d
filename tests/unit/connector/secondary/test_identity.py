"""Engines that may compute or arrange other bytes never share a chunk of a secondary tier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.v1.kv_offload.tiering.base", reason="vLLM with secondary tiers is not installed")

import torch
from vllm.v1.kv_offload.config import OffloadingConfig

from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.secondary.identity import describe_tier, find_prefix_groups, names_are_private
from kvoffload.errors import IdentityError, UnsupportedError
from tests.kit.connector.changes import FP8, Change, set_in
from tests.kit.connector.engine_configs import (
    AttentionLayer,
    full,
    make_config,
    make_vllm_config,
    mla,
    recurrent,
    window,
)
from tests.kit.connector.tier_configs import make_rows


def fingerprint(
    change: Change | None = None,
    *,
    rows: Callable[[OffloadingConfig], OffloadingConfig] = lambda rows: rows,
    num_blocks: int = 8,
    row_bytes: int = 4096,
    layers: dict[str, Any] | None = None,
    **spec: Any,
) -> bytes:
    cache = make_config((["a", "b"], full(**spec)), num_blocks=num_blocks)
    config = make_vllm_config(layers=layers)
    if change is not None:
        change(config)
    identity = describe_tier(config, cache, rows(make_rows(config, cache)), row_bytes=row_bytes)
    return bytes(identity.fingerprint())


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(set_in("model_config", model="acme/other"), id="model"),
        pytest.param(set_in("model_config", revision="1" * 40), id="revision"),
        pytest.param(set_in("model_config", dtype=torch.float16), id="model dtype"),
        pytest.param(set_in("model_config", quantization="fp8"), id="weights quantised as they are loaded"),
        pytest.param(set_in("load_config", load_format="dummy"), id="random weights"),
        pytest.param(set_in("cache_config", cache_dtype="fp8"), id="cache dtype"),
        pytest.param(set_in("cache_config", prefix_caching_hash_algo="sha256_cbor"), id="hash algorithm"),
        pytest.param(set_in("parallel_config", tensor_parallel_size=2), id="tensor parallel"),
        pytest.param(set_in("parallel_config", pipeline_parallel_size=2), id="pipeline parallel"),
        pytest.param(set_in("parallel_config", decode_context_parallel_size=2), id="decode context parallel"),
        pytest.param(
            lambda config: setattr(config, "attention_config", SimpleNamespace(backend="FLASHINFER")), id="kernels"
        ),
    ],
)
def test_engines_that_differ_share_nothing(change: Change) -> None:
    assert fingerprint(change) != fingerprint()


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({"block_size": 8}, id="block size"),
        pytest.param({"dtype": torch.float16}, id="page dtype"),
        pytest.param({"num_kv_heads": 4}, id="heads"),
        pytest.param({"row_bytes": 8192}, id="row"),
        pytest.param({"rows": lambda rows: replace(rows, kv_cache_layout="BLHNC")}, id="layout"),
        pytest.param({"rows": lambda rows: replace(rows, canonical_layout=True)}, id="canonical"),
        pytest.param({"rows": lambda rows: replace(rows, replicated_layout=True)}, id="one copy of replicas"),
        pytest.param(
            {"rows": lambda rows: replace(rows, cache=replace(rows.cache, blocks_per_chunk=4))}, id="chunk of blocks"
        ),
    ],
)
def test_chunks_that_differ_are_never_shared(given: dict[str, Any]) -> None:
    assert fingerprint(**given) != fingerprint()


def test_engines_with_other_hash_seeds_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    one = fingerprint()
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert fingerprint() != one


def test_hashes_of_a_drawn_seed_are_their_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every start of such an engine makes other ones, and two engines may make equal ones for other tokens."""
    monkeypatch.setattr(vllm_compat, "get_hash_fn_by_name", lambda name: name)
    monkeypatch.setattr(vllm_compat.kv_cache_utils, "resolve_none_hash_seed", lambda function: object())
    assert fingerprint() != fingerprint()


def test_machines_whose_kernels_may_differ_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    here = fingerprint()
    monkeypatch.setattr(vllm_compat, "describe_platform", lambda: {"device": "cuda another"})
    assert fingerprint() != here


def test_layers_tell_what_their_pages_hold_where_they_are_to_be_seen() -> None:
    def layers(**given: Any) -> dict[str, Any]:
        return {name: AttentionLayer(**given) for name in ("a", "b")}

    assert fingerprint(layers=layers()) == fingerprint(layers=layers())
    assert fingerprint(layers=layers(backend="OTHER")) != fingerprint(layers=layers())
    assert fingerprint(layers=layers(scales=(1.0, 2.0))) != fingerprint(layers=layers())


def test_the_size_of_a_cache_does_not_matter() -> None:
    assert fingerprint(num_blocks=16) == fingerprint(num_blocks=8)


def test_scales_that_are_calculated_at_every_start_are_refused() -> None:
    set_scales = set_in("cache_config", calculate_kv_scales=True)
    with pytest.raises(UnsupportedError, match="calculates new KV scales"):
        fingerprint(set_scales, **FP8)
    assert fingerprint(set_scales) == fingerprint()


def test_a_model_without_a_revision_is_refused() -> None:
    with pytest.raises(IdentityError, match="revision"):
        fingerprint(set_in("model_config", revision=None))


def test_a_cpu_tier_without_rows_is_refused() -> None:
    with pytest.raises(IdentityError, match="no rows"):
        fingerprint(row_bytes=0)


def test_names_are_private_where_adapters_may_differ() -> None:
    config = make_vllm_config()
    assert not names_are_private(config)
    config.lora_config = SimpleNamespace()
    assert names_are_private(config)


def test_windows_and_states_need_no_whole_prefix() -> None:
    specs = [full(4), window(4), recurrent(4), full(4)]
    cache = make_config(*(([name], spec) for name, spec in zip("abcd", specs, strict=True)))
    assert find_prefix_groups(cache) == {0, 3}
    assert find_prefix_groups(make_config((["a"], mla(4)))) == {0}

"""Which groups of an engine are kept, and why an engine is idle."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    UniformTypeKVCacheSpecs,
)

from docs.table import render_table
from kvoffload.connector.engine.kept_groups import SPECS, Fate, describe_unkept, find_fate, find_why_idle
from tests.kit.connector.engine_configs import full, latent_window, make_config, make_vllm_config, mla, ring, window


@dataclass(frozen=True, kw_only=True)
class UnheardOfSpec(FullAttentionSpec):
    """A kind of cache that a later vLLM might bring, derived from one that we know."""


@dataclass(frozen=True, kw_only=True)
class UnheardOfScratchSpec(KVCacheSpec):
    """A kind that its engine does not cache by prefix and that shares no base with ours."""

    @property
    def prefix_cacheable(self) -> bool:
        return False

    @property
    def page_size_bytes(self) -> int:
        return 4096


def test_the_page_on_vllm_has_the_table() -> None:
    rows = [[f"`{name}`", one.fate, one.why] for name, one in SPECS.items()]
    table = "\n".join(render_table(["vLLM's kind", "fate", "what, or why"], rows))
    assert table in (Path(__file__).parents[4] / "docs/vllm.md").read_text(), table


def attention(kind: type[AttentionSpec], **more: Any) -> Any:
    return kind(block_size=4, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, **more)


def fates(config: KVCacheConfig) -> list[Fate]:
    return [find_fate(config, number).fate for number in range(len(config.kv_cache_groups))]


def divide(*, tensor: int, pipeline: int, machines: int) -> dict[str, int]:
    return {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline, "nnodes_within_dp": machines}


def test_a_group_that_the_engine_does_not_cache_by_prefix_is_rebuilt_by_it() -> None:
    config = make_config((["a"], mla()), (["ring"], ring()), (["b"], latent_window(bounded_replay=True)))
    assert fates(config) == [Fate.KEPT, Fate.REBUILT, Fate.REBUILT]
    assert find_why_idle(make_vllm_config(), config) == ""
    line = describe_unkept(config)
    assert "group 1 (CircularBufferSpec, ring: it holds keys" in line
    assert "group 2 (SlidingWindowMLASpec, b: the engine does not cache its blocks by prefix)" in line


def test_a_kind_that_nobody_knows_and_that_the_engine_rebuilds_costs_no_other_group() -> None:
    config = make_config((["a"], full()))
    config.kv_cache_groups.append(KVCacheGroupSpec(["x"], UnheardOfScratchSpec(block_size=1)))
    assert fates(config) == [Fate.KEPT, Fate.REBUILT]
    assert find_why_idle(make_vllm_config(), config) == ""


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (attention(UnheardOfSpec), r"every hit would need group 1 \(UnheardOfSpec, x: kvoffload does not know it\)"),
        (attention(CrossAttentionSpec), r"group 1 \(CrossAttentionSpec, x: its content depends on an encoder's input"),
        (
            UniformTypeKVCacheSpecs(block_size=4, kv_cache_specs={"x": full(), "y": attention(UnheardOfSpec)}),
            r"group 1 \(FullAttentionSpec, UnheardOfSpec, 2 layers from x on: kvoffload does not know it",
        ),
    ],
)
def test_an_engine_with_a_kind_that_every_hit_would_need_is_idle(spec: KVCacheSpec, reason: str) -> None:
    config = make_config((["a"], full()))
    names = list(getattr(spec, "kv_cache_specs", {"x": spec}))
    config.kv_cache_groups.append(KVCacheGroupSpec(names, spec))
    line = find_why_idle(make_vllm_config(), config)
    assert re.search(reason, line)
    assert "\n" not in line


def test_an_engine_that_caches_nothing_by_prefix_is_idle() -> None:
    assert "caches none of its groups" in find_why_idle(make_vllm_config(), make_config((["a"], ring())))


def test_an_engine_without_a_kv_cache_is_idle() -> None:
    config = make_config((["a"], full()))
    config.kv_cache_tensors.clear()
    assert find_why_idle(make_vllm_config(), config) == "this model has no KV cache"


def test_an_engine_with_a_cache_in_host_memory_is_idle() -> None:
    config = make_config((["a"], full()), (["b"], window()))
    config.kv_cache_tensors[0].host_resident = True
    assert "host memory" in find_why_idle(make_vllm_config(), config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefill_context_parallel_size": 2}, "prefill context parallel"),
        (divide(tensor=2, pipeline=3, machines=2), "2 machines with 3 stages of 2 ranks"),
        (divide(tensor=3, pipeline=1, machines=2), "2 machines with 1 stages of 3 ranks"),
        (divide(tensor=4, pipeline=3, machines=2), "2 machines with 3 stages of 4 ranks"),
    ],
)
def test_an_engine_that_divides_its_ranks_in_a_way_that_is_not_served_is_idle(
    changes: dict[str, int], reason: str
) -> None:
    config = make_vllm_config()
    for name, value in changes.items():
        setattr(config.parallel_config, name, value)
    assert reason in find_why_idle(config, make_config((["a"], full())))

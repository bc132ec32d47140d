"""Asks vLLM for the groups of the gallery's models and registers them with the connector: `python -m
tests.kit.plan.asked` prints all answers as JSON, from one process."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.connector.engine.layer_shapes import alone, describe_spec, make_layers
from kvoffload.errors import KVOffloadError
from kvoffload.plan.exact import read_rows, write_config
from kvoffload.plan.model_shape import LayerShape
from tests.kit.plan.gallery import GALLERY

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

ASK_S = 1200.0
WORDS = {
    "FullAttentionSpec": "attention",
    "MLAAttentionSpec": "latents",
    "SlidingWindowSpec": "windows",
    "SlidingWindowMLASpec": "windows",
    "ChunkedLocalAttentionSpec": "chunks",
    "MambaSpec": "states",
    "CircularBufferSpec": "rings",
}
REGISTRY = "--registry"
BLOCKS = 2
"""Blocks of the cache that is registered: the null block, and one that the self-test writes to."""


@dataclass(frozen=True)
class Group:
    """A group of vLLM's block tables."""

    layers: int
    specs: tuple[str, ...]
    """The classes of its layers' specs."""
    block_size: int
    page_bytes: int
    prefix_cacheable: bool
    replay_tokens: int

    @property
    def what(self) -> str:
        """The kinds of its layers, in words."""
        return " and ".join(dict.fromkeys(WORDS[spec] for spec in self.specs))


@dataclass(frozen=True)
class Answer:
    """The groups that vLLM makes of a model, and whether the connector takes them."""

    kv_dtype: str
    layout: str
    layers: list[LayerShape]
    """Those that keep something, as `kvoffload plan --exact` has them."""
    groups: list[Group]
    registered: int
    """Groups that the connector registered, with all bytes accounted for and its self-test done."""
    refused: str
    """Why the connector refused the model; empty if it did not."""
    idle: str
    """Why the connector would keep nothing of it; empty if it keeps something."""


@cache
def ask_all() -> dict[str, Answer]:
    """Asks for all models in a process of its own."""
    found = _run()
    return {
        name: Answer(
            **{key: value for key, value in one.items() if key not in ("rows", "groups")},
            layers=list(read_rows(one["rows"], 1)),
            groups=[Group(**{**group, "specs": tuple(group["specs"])}) for group in one["groups"]],
        )
        for name, one in found.items()
    }


def ask_registry() -> dict[str, str]:
    """Returns what the connector says, by architecture, of the models that vLLM makes by the defaults of their classes
    in transformers; "" where it takes them."""
    return {name: str(one["refused"]) for name, one in _run(REGISTRY).items()}


def _run(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "tests.kit.plan.asked", *arguments]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False, timeout=ASK_S
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    assert isinstance(found, dict)
    return found


def find_registered() -> dict[str, dict[str, Any]]:
    """Returns a config without more than names for each architecture of vLLM's that transformers has a class for."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from vllm.model_executor.models import ModelRegistry

    supported = set(ModelRegistry.get_supported_archs())
    found: dict[str, dict[str, Any]] = {}
    for names in (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES):
        for kind, architecture in names.items():
            if architecture in supported:
                config = {"model_type": kind, "architectures": [architecture], "torch_dtype": "bfloat16"}
                found.setdefault(architecture, config)
    return found


def make(model: dict[str, Any]) -> tuple[VllmConfig, dict[str, KVCacheSpec]]:
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), model)
        return make_layers(Path(folder), num_gpu_blocks_override=BLOCKS)


def describe_model(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> dict[str, Any]:
    from kvoffload.connector.engine.kept_groups import find_why_idle

    cache = make_cache(config, specs)
    registered, refused = try_to_register(cache)
    return {
        "kv_dtype": str(config.cache_config.cache_dtype),
        "layout": cache.kv_cache_layout,
        "rows": [row for spec in specs.values() if (row := describe_spec(spec)) is not None],
        "groups": [describe_group(cache, index) for index in range(len(cache.kv_cache_groups))],
        "registered": registered,
        "refused": refused,
        "idle": find_why_idle(config, cache),
    }


def make_cache(config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """Makes groups and places of a model's layers as vLLM's engine core does, with few blocks: whether a whole prompt
    has room is not asked."""
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(config)
    layouts = [layout.name for layout in get_supported_kv_cache_layouts(get_current_attn_backends(config))]
    resolve_kv_cache_layout(config, [layouts], list(specs.values()))
    groups = kv_cache_utils.get_kv_cache_groups(config, dict(specs))
    cache = kv_cache_utils.get_kv_cache_config_from_groups(config, groups, 1 << 40)
    cache.kv_cache_layout = config.cache_config.kv_cache_layout
    sizes = kv_cache_utils.resolve_kv_cache_block_sizes(cache, config)
    cache.cache_hit_alignment_tokens, cache.hash_block_size = sizes
    return cache


def try_to_register(cache: KVCacheConfig) -> tuple[int, str]:
    """Returns how many groups were registered, or why none was."""
    from tests.kit.connector.engine_configs import make_tensors
    from tests.kit.connector.registered import describe, register

    tensors = make_tensors(cache)
    try:
        geometry = describe(cache, tensors)
        register(geometry, tensors)
    except KVOffloadError as fault:
        return 0, fault.message
    return len(geometry.groups), ""


def describe_group(cache: KVCacheConfig, index: int) -> dict[str, Any]:
    group = cache.kv_cache_groups[index]
    spec = group.kv_cache_spec
    own = getattr(spec, "kv_cache_specs", {"": spec})
    return {
        "layers": len(group.layer_names),
        "specs": sorted({type(one).__name__ for one in own.values()}),
        "block_size": spec.block_size,
        "page_bytes": spec.page_size_bytes,
        "prefix_cacheable": index in cache.prefix_cacheable_group_ids,
        "replay_tokens": spec.prefix_replay_tokens,
    }


def main() -> None:
    found = {}
    logging.disable(logging.CRITICAL)
    with alone():
        if sys.argv[1:] == [REGISTRY]:
            for name, config in find_registered().items():
                try:
                    made = make(config)
                except Exception as fault:  # noqa: BLE001  (of vLLM's models: the defaults are not all that they ask for)
                    print(f"{name}: {type(fault).__name__}: {str(fault)[:200]}")
                    continue
                found[name] = describe_model(*made)
        else:
            found = {name: describe_model(*make(model.asked)) for name, model in GALLERY.items()}
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()

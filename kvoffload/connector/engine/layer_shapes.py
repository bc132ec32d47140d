"""Asks vLLM what each layer of a model keeps in the KV cache: makes the model without weights and reads its specs.

Runs as a process of its own, for `kvoffload plan --exact`: `python -m kvoffload.connector.engine.layer_shapes FOLDER KV
STATE` prints a JSON list with a row for each layer.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvoffload.connector.engine.pretended_gpu import WithoutMemory, pretend

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

Row = dict[str, str | int]


def ask_vllm(folder: Path, *, kv_dtype: str, state_dtype: str) -> list[Row]:
    """Returns what each layer keeps on one rank. Raises all that vLLM raises."""
    with alone():
        _, specs = make_layers(folder, kv_cache_dtype=kv_dtype, mamba_ssm_cache_dtype=state_dtype)
    return [row for spec in specs.values() if (row := describe_spec(spec)) is not None]


@contextmanager
def alone() -> Iterator[None]:
    """Makes this process the only rank of an engine, as models ask for when they are made. On vLLM's CPU build it
    pretends to have a GPU, which most models are served on."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and find_spec("triton") is not None:
        pretend()
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.v1.worker.workspace import init_workspace_manager

    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as meeting:
        init_distributed_environment(1, 0, f"file://{meeting}/place", 0, "gloo")
        initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("meta"))
    yield


def make_layers(folder: Path, **arguments: Any) -> tuple[VllmConfig, dict[str, KVCacheSpec]]:
    """Makes the modules of a model's text part without memory, for an engine that is started with these arguments, and
    returns the specs of its layers by their names. Call it within `alone()`."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    config = EngineArgs(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        language_model_only=True,
        **arguments,
    ).create_engine_config()
    dtype, before = config.model_config.dtype, torch.get_default_dtype()
    assert isinstance(dtype, torch.dtype)  # "auto" and names are resolved
    torch.set_default_dtype(dtype)
    try:
        with set_current_vllm_config(config), torch.device("meta"), WithoutMemory():
            initialize_model(config)
            current_platform.update_block_size_for_backend(config)
            return config, get_kv_cache_spec(config)
    finally:
        torch.set_default_dtype(before)


def describe_spec(spec: Any) -> Row | None:
    """Describes what a layer of this spec keeps. None: nothing, since vLLM never finds it again. TypeError: this kind
    of spec is not known here."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    if not getattr(spec, "prefix_cacheable", True):
        return None
    if isinstance(spec, MambaSpec):
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
        return {"keeps": "STATE", "what": str(spec.mamba_type.name).lower(), "state_bytes": sum(sizes)}
    row: Row = {
        # Compressed layers have one entry for several tokens, whose bytes are not always a multiple of these.
        "token_bytes": -(-spec.real_page_size_bytes // spec.block_size),
        "heads": getattr(spec, "num_kv_heads", 1),
    }
    if isinstance(spec, SlidingWindowSpec):
        return {**row, "keeps": "WINDOW", "what": "sliding window", "tokens": spec.sliding_window}
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return {**row, "keeps": "WINDOW", "what": "chunk", "tokens": spec.attention_chunk_size}
    if isinstance(spec, MLAAttentionSpec):
        is_index = getattr(spec.cache_role, "value", "") == "indexer"
        return {**row, "keeps": "TOKENS", "what": "index" if is_index else "latent (MLA)"}
    if type(spec).__name__ == "FullAttentionSpec":
        return {**row, "keeps": "TOKENS", "what": "attention"}
    raise TypeError(f"vLLM has a {type(spec).__name__} there, which is not known here")


def main() -> None:
    """Prints the rows, or what vLLM raised, as the last line of the output."""
    logging.disable(logging.CRITICAL)
    folder, kv_dtype, state_dtype = sys.argv[1:]
    try:
        found: object = ask_vllm(Path(folder), kv_dtype=kv_dtype, state_dtype=state_dtype)
    except Exception as fault:  # noqa: BLE001  (vLLM's and transformers' own, of all kinds)
        found = {"fault": f"{type(fault).__name__}: {' '.join(str(fault).split())[:500]}"}
    print(f"\n{json.dumps(found)}")


if __name__ == "__main__":
    main()

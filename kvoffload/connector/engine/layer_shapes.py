"""What vLLM itself says that each layer of a model keeps: the model without weights, asked for its cache's specs.

A process of its own, for `kvoffload plan --exact`: `python -m kvoffload.connector.engine.layer_shapes FOLDER KV STATE`
prints a JSON list, a row for each layer.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

Row = dict[str, str | int]


def ask_vllm(folder: Path, *, kv_dtype: str, state_dtype: str) -> list[Row]:
    """Returns what one rank keeps. Raises whatever vLLM raises."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    arguments: dict[str, Any] = {"kv_cache_dtype": kv_dtype, "mamba_ssm_cache_dtype": state_dtype}
    config = EngineArgs(
        model=str(folder), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, **arguments
    ).create_engine_config()
    with set_current_vllm_config(config), tempfile.TemporaryDirectory() as meeting:
        init_distributed_environment(1, 0, f"file://{meeting}/place", 0, "gloo")
        initialize_model_parallel(1, 1)
        dtype = config.model_config.dtype
        assert isinstance(dtype, torch.dtype)  # "auto" and names are resolved
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            initialize_model(config)
        layers = config.compilation_config.static_forward_context.values()
        specs = [layer.get_kv_cache_spec(config) for layer in layers if hasattr(layer, "get_kv_cache_spec")]
    return [describe_spec(spec) for spec in specs if spec is not None]


def describe_spec(spec: Any) -> Row:
    """TypeError: what such a layer keeps is not known here."""
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

    if isinstance(spec, MambaSpec):
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)]
        return {"keeps": "STATE", "what": str(spec.mamba_type.name).lower(), "state_bytes": sum(sizes)}
    row: Row = {
        "token_bytes": spec.real_page_size_bytes // spec.block_size,
        "heads": getattr(spec, "num_kv_heads", 1),
    }
    if isinstance(spec, SlidingWindowSpec):
        return {**row, "keeps": "WINDOW", "what": "sliding window", "tokens": spec.sliding_window}
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return {**row, "keeps": "WINDOW", "what": "chunk", "tokens": spec.attention_chunk_size}
    if isinstance(spec, MLAAttentionSpec):
        return {**row, "keeps": "TOKENS", "what": "latent (MLA)"}
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

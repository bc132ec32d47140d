"""The bytes that each layer keeps, from vLLM itself: it is asked in a process of its own, whose imports and logs are
not ours."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvoffload.errors import ConfigError
from kvoffload.plan.model_shape import Keeps, LayerShape, ModelShape, ShapeSettings

ASK_S = 300.0
_ASKED = "kvoffload.connector.engine.layer_shapes"
_NEED_TOKENIZERS = ("engram_layer_ids",)
"""Fields whose parts of a model are made with its tokenizer and keep nothing in the cache: DeepSeek-V4.1's tables of
token sequences."""
_TOKENS = {"<|imgpad|>": 0}
"""Numbers of tokens that a model's class asks for, and that decide nothing about the cache: those of dots3."""


def ask_vllm(config: Mapping[str, Any], settings: ShapeSettings) -> ModelShape:
    """Asks vLLM what a model's layers keep. ConfigError: vLLM is not installed here or does not take this config, and
    what it says."""
    if find_spec("vllm") is None:
        raise ConfigError("--exact asks vLLM, which is not installed here", remedy="run it in vLLM's Python")
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), config)
        rows = _run([folder, settings.kv_dtype, settings.state_dtype])
    text = config.get("text_config", config)
    return ModelShape(
        model_type=str(text.get("model_type", "unknown")),
        layers=list(read_rows(rows, settings.ranks)),
        max_tokens=int(text.get("max_position_embeddings") or 0),
    )


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes a model's config for vLLM to make its layers of, without what only a tokenizer completes."""
    text = config.get("text_config")
    shown = {name: value for name, value in config.items() if name not in _NEED_TOKENIZERS}
    if isinstance(text, dict):
        shown["text_config"] = {name: value for name, value in text.items() if name not in _NEED_TOKENIZERS}
    (folder / "config.json").write_text(json.dumps(shown))
    (folder / "added_tokens.json").write_text(json.dumps(_TOKENS))


def _run(arguments: Sequence[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-P", "-m", _ASKED, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"vLLM said nothing within {ASK_S:.0f} s", remedy="run it without --exact") from None
    try:
        found = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    except ValueError:
        found = None
    if not isinstance(found, list):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        reason = found["fault"] if isinstance(found, dict) else lines[-1]
        raise ConfigError(f"vLLM does not take this config: {reason}", remedy="start it with the model to see more")
    return found


def read_rows(rows: Sequence[Mapping[str, Any]], ranks: int) -> Iterator[LayerShape]:
    """Reads vLLM's rows of one rank as layers of so many ranks."""
    for row in rows:
        keeps = Keeps[row["keeps"]]
        if keeps is Keeps.STATE:
            if ranks > 1:
                raise ConfigError("--exact knows states of one rank alone", remedy="leave --ranks out")
            yield LayerShape(keeps=keeps, what=row["what"], state_bytes=row["state_bytes"])
            continue
        heads = row["heads"]
        if heads % ranks and ranks % heads:
            raise ConfigError(
                f"{heads} heads cannot be shared by {ranks} ranks", remedy="choose another number of ranks"
            )
        yield LayerShape(
            keeps=keeps,
            what=row["what"],
            token_bytes=row["token_bytes"],
            tokens=row.get("tokens", 0),
            copies=max(ranks // heads, 1),
        )

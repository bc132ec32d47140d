"""Rows of vLLM's specs. tests/vllm/test_plan.py asks its models for them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

from kvoffload.connector.engine import layer_shapes
from kvoffload.connector.engine.layer_shapes import describe_spec, main

HEADS = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}


def test_attention_is_told_in_bytes_of_a_token() -> None:
    row = {"token_bytes": 8 * 2 * 128 * 2, "heads": 8}
    assert describe_spec(FullAttentionSpec(**HEADS)) == {**row, "keeps": "TOKENS", "what": "attention"}
    window = describe_spec(SlidingWindowSpec(**HEADS, sliding_window=1024))
    assert window == {**row, "keeps": "WINDOW", "what": "sliding window", "tokens": 1024}
    chunk = describe_spec(ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=8192))
    assert chunk == {**row, "keeps": "WINDOW", "what": "chunk", "tokens": 8192}


def test_entries_of_several_tokens_are_rounded_up_to_bytes_of_one() -> None:
    latent = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "state_content_bytes": 584}
    row = describe_spec(MLAAttentionSpec(block_size=256, tokens_per_state=128, **latent))
    assert row == {"token_bytes": 5, "heads": 1, "keeps": "TOKENS", "what": "latent (MLA)"}
    index = MLAAttentionSpec(block_size=256, tokens_per_state=4, cache_role=SparseCacheRole.INDEXER, **latent)
    assert describe_spec(index) == {"token_bytes": 146, "heads": 1, "keeps": "TOKENS", "what": "index"}


def test_what_vllm_never_finds_again_keeps_nothing() -> None:
    assert describe_spec(CircularBufferSpec(**HEADS)) is None
    latent = {"block_size": 32, "num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "sliding_window": 128}
    assert describe_spec(SlidingWindowMLASpec(**latent, bounded_replay=True)) is None
    kept = describe_spec(SlidingWindowMLASpec(**latent))
    assert kept == {"token_bytes": 512, "heads": 1, "keeps": "WINDOW", "what": "sliding window", "tokens": 128}


def test_a_spec_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="vLLM has a SimpleNamespace there"):
        describe_spec(SimpleNamespace(real_page_size_bytes=16, block_size=16))


def test_what_vllm_raises_is_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def ask(folder: Path, **_: str) -> None:
        raise ValueError(f"nothing in {folder.name}\n\n  at all\n")

    monkeypatch.setattr(layer_shapes, "ask_vllm", ask)
    monkeypatch.setattr(layer_shapes.logging, "disable", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["layer_shapes", str(tmp_path / "model"), "auto", "auto"])
    main()
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"fault": "ValueError: nothing in model at all"}

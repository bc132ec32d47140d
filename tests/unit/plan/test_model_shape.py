"""The bytes that layers keep of a token: published models, all forms of their configs, and refused ones."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import ConfigError
from kvoffload.plan import model_shape
from kvoffload.plan.model_shape import MAX_CONFIG_BYTES, Keeps, ShapeSettings, complete_config, read_config, read_shape
from tests.kit.plan.configs import DEEPSEEK_V3, ENGINES_ALONE, GPT_OSS, LLAMA_8B, NEMOTRON_H, PUBLISHED, QWEN_NEXT


def sums(config: dict[str, Any], **settings: Any) -> dict[Keeps, tuple[int, int]]:
    """Sums by what is kept: layers, and bytes of a token or a state of all of them."""
    found: dict[Keeps, tuple[int, int]] = {}
    for layer in read_shape(config, ShapeSettings(**settings)).layers:
        count, size = found.get(layer.keeps, (0, 0))
        found[layer.keeps] = count + 1, size + layer.token_bytes + layer.state_bytes
    return found


DELTA_STATE = (2 * 16 * 128 + 32 * 128) * 3 * 2 + 32 * 128 * 128 * 2
MAMBA_STATE = (128 * 64 + 2 * 8 * 128) * 3 * 2 + 128 * 64 * 128 * 4


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models(name: str) -> None:
    model = PUBLISHED[name]
    layers = read_shape(model.config, ShapeSettings(state_dtype="float32")).layers
    for keeps, (count, size) in ((Keeps.TOKENS, model.full), (Keeps.WINDOW, model.window), (Keeps.STATE, model.state)):
        found = [layer for layer in layers if layer.keeps is keeps]
        assert [layer.token_bytes + layer.state_bytes for layer in found] == [size] * count
        assert {layer.tokens for layer in found} <= {model.window_tokens if keeps is Keeps.WINDOW else 0}


@pytest.mark.parametrize("name", ENGINES_ALONE)
def test_what_a_config_does_not_say_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="; run it with --exact where vLLM is installed"):
        read_shape(ENGINES_ALONE[name], ShapeSettings())


def test_without_transformers_what_it_would_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shape, "find_spec", lambda _: None)
    assert sums(LLAMA_8B) == {Keeps.TOKENS: (32, 131_072)}
    for name in ("Gemma-2-9B", "Gemma-3-4B", "Llama-4-Scout"):
        with pytest.raises(ConfigError, match="run it with --exact"):
            read_shape(PUBLISHED[name].config, ShapeSettings())


def test_types_change_what_tokens_and_states_take() -> None:
    assert sums(LLAMA_8B, kv_dtype="fp8") == {Keeps.TOKENS: (32, 65_536)}
    assert sums(LLAMA_8B, kv_dtype="int8_per_token_head") == {Keeps.TOKENS: (32, 32 * 8 * 2 * 132)}
    assert sums(DEEPSEEK_V3, kv_dtype="fp8") == {Keeps.TOKENS: (61, 35_136)}
    wider = 36 * 32 * 128 * 128 * 2
    assert sums(QWEN_NEXT, state_dtype="float32")[Keeps.STATE] == (36, 36 * DELTA_STATE + wider)
    assert sums(QWEN_NEXT | {"mamba_ssm_dtype": "float32"})[Keeps.STATE] == (36, 36 * DELTA_STATE + wider)
    assert sums(QWEN_NEXT, kv_dtype="fp8")[Keeps.STATE] == (36, 36 * DELTA_STATE), "states are no KV"


def test_what_ranks_hold_alike_counts_once() -> None:
    """The server stores one copy of it. The states of Mamba 2 are different on each rank, as they repeat groups."""
    for ranks in (8, 16):
        assert sums(LLAMA_8B, ranks=ranks) == sums(LLAMA_8B)
        assert sums(DEEPSEEK_V3, ranks=ranks) == {Keeps.TOKENS: (61, 70_272)}
    assert {layer.copies for layer in read_shape(LLAMA_8B, ShapeSettings(ranks=16)).layers} == {2}
    assert {layer.copies for layer in read_shape(DEEPSEEK_V3, ShapeSettings(ranks=16)).layers} == {16}
    repeated = (128 * 64 + 2 * 16 * 128) * 3 * 2 + 128 * 64 * 128 * 4
    assert sums(NEMOTRON_H, ranks=16)[Keeps.STATE] == (3, 3 * repeated)
    with pytest.raises(ConfigError, match="num_key_value_heads = 8 cannot be shared by 3 ranks"):
        sums(LLAMA_8B, ranks=3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_dtype": "fp9"}, "kv-dtype 'fp9' is not known"),
        ({"state_dtype": "fp8"}, "state-dtype 'fp8' is not known"),
        ({"ranks": 3}, "cannot be shared by 3 ranks"),
    ],
)
def test_what_no_config_makes_right_is_said_without_transformers(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], said: str
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(model_shape, "find_spec", asked.append)
    with pytest.raises(ConfigError, match=said):
        sums(LLAMA_8B, **settings)
    assert asked == []


def test_a_head_may_be_named_or_be_a_part_of_what_is_hidden() -> None:
    named = {name: value for name, value in LLAMA_8B.items() if name != "hidden_size"} | {"head_dim": 128}
    assert sums(named) == sums(LLAMA_8B)


BARE = LLAMA_8B | {"model_type": "kimi_k2"}
"""Of no class in transformers, so that nothing is completed."""


@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"model_type": "mistral", "sliding_window": 4096}, {Keeps.WINDOW: 32}),
        ({"model_type": "mistral", "sliding_window": None}, {Keeps.TOKENS: 32}),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, {Keeps.TOKENS: 32}),
        ({"layer_types": ["chunked_attention"] * 24 + ["full_attention"] * 8, "attention_chunk_size": 8192},
         {Keeps.WINDOW: 24, Keeps.TOKENS: 8}),
        ({"num_kv_shared_layers": 12}, {Keeps.TOKENS: 20}),
        (NEMOTRON_H | {"hybrid_override_pattern": None, "num_hidden_layers": 4, "attn_layer_indices": [2]},
         {Keeps.STATE: 3, Keeps.TOKENS: 1}),
        (NEMOTRON_H | {"hybrid_override_pattern": None, "num_hidden_layers": 2,
                       "layers_block_type": ["mamba", "attention"]}, {Keeps.STATE: 1, Keeps.TOKENS: 1}),
    ],
)  # fmt: skip
def test_all_ways_to_say_which_layer_keeps_what(more: dict[str, Any], kept: dict[Keeps, int]) -> None:
    assert {keeps: count for keeps, (count, _) in sums(BARE | more).items()} == kept


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"sliding_window": 4096}, "does not say in which layers; add layer_types"),
        (
            {"model_type": "other"},
            "layers of 'other' models are not known from this config alone; run it with --exact",
        ),
        ({"layer_types": ["full_attention"] * 31}, "31 layers are named, and there are 32"),
        ({"layer_types": ["quantum"] * 32}, "layers of type 'quantum' are not known here; run it with --exact"),
        ({"layer_types": ["linear_attention"] * 32}, "has no 'linear_num_key_heads'"),
        ({"layer_types": "full_attention"}, "'layer_types' in the model's config is no list of words"),
        ({"is_encoder_decoder": True}, "models with an encoder"),
        ({"index_topk": 2048}, "the config alone does not tell what models with 'index_topk' keep"),
        (
            {"swa_num_key_value_heads": 8},
            "the config alone does not tell what models with 'swa_num_key_value_heads' keep",
        ),
        ({"num_attention_groups": 8}, "the config alone does not tell what models with 'num_attention_groups' keep"),
        ({"num_hidden_layers": "many"}, "'num_hidden_layers' = 'many'"),
        ({"num_hidden_layers": None}, "has no 'num_hidden_layers'"),
        ({"num_hidden_layers": 10**9}, "a model of 1000000000 layers"),
        ({"num_key_value_heads": 0}, "attention without heads"),
        ({"num_key_value_heads": -8}, "'num_key_value_heads' = '-8'"),
        ({"torch_dtype": "int3"}, "kv-dtype 'int3' is not known"),
        ({"num_kv_shared_layers": 32}, "no layer of this model keeps anything"),
    ],
)
def test_what_is_not_said_or_not_known_is_refused_in_one_line(more: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as found:
        read_shape(BARE | more, ShapeSettings())
    assert "\n" not in str(found.value)


def test_a_latent_has_no_scales_of_heads() -> None:
    with pytest.raises(ConfigError, match="a latent has no int8_per_token_head"):
        read_shape(DEEPSEEK_V3, ShapeSettings(kv_dtype="int8_per_token_head"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)


@given(changed=st.dictionaries(st.sampled_from([*NEMOTRON_H, *GPT_OSS, "text_config", "attn_layer_indices"]), JSON))
def test_whatever_a_config_says_is_read_or_refused(changed: dict[str, Any]) -> None:
    with contextlib.suppress(ConfigError):
        shape = read_shape(NEMOTRON_H | changed, ShapeSettings(ranks=2))
        assert all(layer.token_bytes + layer.state_bytes >= 0 for layer in shape.layers)


def test_a_folder_or_its_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    assert read_config(tmp_path) == read_config(file) == LLAMA_8B


@pytest.mark.parametrize("text", ["", "[1]", "{", " " * (MAX_CONFIG_BYTES + 1) + "{}", "[" * 100_000])
def test_what_is_no_config_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is no model's config"):
        read_config(file)


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path)


def test_of_a_name_on_the_hub_it_is_said_which_file_to_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"some-org/Model-1\.5B config\.json`"):
        read_config(Path("some-org/Model-1.5B"))


# ---- what the model's class completes ----


def test_a_class_says_which_layer_is_what() -> None:
    found = complete_config(PUBLISHED["Gemma-2-9B"].config)
    assert found is not None
    assert found["layer_types"] == ["sliding_attention", "full_attention"] * 21


def test_of_a_model_that_sees_it_is_the_text_part_with_the_models_type() -> None:
    found = complete_config(PUBLISHED["Gemma-3-4B"].config)
    assert found is not None
    assert (found["model_type"], found["num_key_value_heads"], found["dtype"]) == ("gemma3_text", 4, "bfloat16")


def test_what_the_config_says_stays() -> None:
    found = complete_config(PUBLISHED["Gemma-2-9B"].config | {"layer_types": ["full_attention"] * 42})
    assert found is not None
    assert found["layer_types"] == ["full_attention"] * 42


@pytest.mark.parametrize(
    "config", [{}, {"model_type": "kimi_linear_of_mine"}, {"model_type": 3}, {"model_type": "gemma2", "head_dim": "x"}]
)
def test_what_is_not_known_or_makes_no_sense_is_not_completed(config: dict[str, Any]) -> None:
    assert complete_config(config) is None


def test_without_transformers_nothing_is_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_shape, "find_spec", lambda _: None)
    assert complete_config(PUBLISHED["Gemma-2-9B"].config) is None


def test_layers_that_are_listed_need_not_be_counted() -> None:
    counted = dict(NEMOTRON_H)
    del counted["num_hidden_layers"]
    assert read_shape(counted, ShapeSettings()) == read_shape(NEMOTRON_H, ShapeSettings())


def test_linear_attention_is_a_state_space_where_the_config_has_the_fields_of_one() -> None:
    state = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_d_conv": 4}
    by_name, by_fields = (
        read_shape({**LLAMA_8B, **state, "layer_types": [kind, "full_attention"] * 16}, ShapeSettings())
        for kind in ("mamba", "linear_attention")
    )
    assert by_fields == by_name
    assert {layer.what for layer in by_name.layers} == {"Mamba 2", "attention"}

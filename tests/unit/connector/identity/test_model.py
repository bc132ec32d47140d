"""The identity of a model: revisions, and the settings that change numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import torch

from kvoffload.connector.identity.model import describe_model, identify_model
from kvoffload.errors import IdentityError
from kvoffload.keys.canonical import encode_canonical
from tests.kit.connector.engine_configs import HfConfig, make_vllm_config

Change = Callable[[Any], None]
COMMIT = "3" * 40


def described(*changes: Change) -> bytes:
    config = make_vllm_config()
    for change in changes:
        change(config)
    return encode_canonical(describe_model(config))


def set_model(**values: Any) -> Change:
    return lambda config: vars(config.model_config).update(values)


def set_hf(**values: Any) -> Change:
    return set_model(hf_config=HfConfig(**values))


def set_load(load_format: str, **extra: Any) -> Change:
    return lambda config: setattr(
        config, "load_config", SimpleNamespace(load_format=load_format, model_loader_extra_config=extra)
    )


def set_media(**values: Any) -> Change:
    return set_model(multimodal_config=SimpleNamespace(**{"mm_processor_cache_gb": 4.0, **values}))


def set_adapters(**values: Any) -> Change:
    return lambda config: setattr(config, "lora_config", SimpleNamespace(**{"lora_dtype": torch.bfloat16, **values}))


def draft_model(**values: Any) -> SimpleNamespace:
    given = {"model": "acme/draft", "revision": COMMIT, "hf_config": HfConfig(), "dtype": torch.bfloat16}
    return SimpleNamespace(**{**given, "quantization": None, "max_model_len": 4096, **values})


def set_draft(draft: Any, *, target: Any = None) -> Change:
    speculation = SimpleNamespace(draft_model_config=draft, target_model_config=target, method="eagle")
    return lambda config: setattr(config, "speculative_config", speculation)


def change_drafting(*, look_ahead: int = 0, **values: Any) -> Change:
    """Changes the drafting of one and the same model that drafts."""

    def change(config: Any) -> None:
        set_draft(draft_model())(config)
        vars(config.speculative_config).update(values)
        config.num_lookahead_tokens = look_ahead

    return change


# ---- revision ----


def revision(**values: Any) -> str:
    model = SimpleNamespace(**{"model": "acme/tiny", "revision": None, "hf_config": HfConfig(), **values})
    return identify_model(model)


def test_a_model_without_a_revision_is_refused() -> None:
    with pytest.raises(IdentityError, match=r"acme/tiny has no revision.*--revision"):
        revision()


def test_a_commit_wins_over_the_name_it_was_asked_by() -> None:
    config = HfConfig(_commit_hash=COMMIT)
    assert revision(hf_config=config, revision="main") == revision(hf_config=config, revision="v1") == COMMIT


@pytest.mark.parametrize("name", ["main", "v1.0", COMMIT[:7]])
def test_a_name_that_may_move_is_no_revision(name: str) -> None:
    with pytest.raises(IdentityError, match=f"revision {name} may be another one tomorrow"):
        revision(revision=name)
    assert revision(revision=COMMIT) == COMMIT


def test_the_commit_of_a_configuration_from_elsewhere_says_nothing_of_the_weights() -> None:
    elsewhere = {"hf_config": HfConfig(_commit_hash=COMMIT), "hf_config_path": "acme/settings"}
    with pytest.raises(IdentityError, match="has no revision"):
        revision(**elsewhere)
    assert revision(**elsewhere, revision="4" * 40) == "4" * 40
    assert revision(**{**elsewhere, "hf_config_path": "acme/tiny"}) == COMMIT


def test_a_folder_is_known_by_what_lies_in_it(tmp_path: Path) -> None:
    def in_folder(weights: bytes) -> str:
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(weights)
        return revision(model=str(tmp_path))

    assert in_folder(b"one") != in_folder(b"two")
    assert in_folder(b"one") == in_folder(b"one")


# ---- the checkpoint's settings ----


def test_values_that_are_not_plain_are_said_in_words() -> None:
    assert described(set_hf(dtype=torch.bfloat16)) != described(set_hf(dtype=torch.float16))
    assert described(set_hf(shape=(1, 2))) == described(set_hf(shape=[1, 2]))
    assert described(set_hf(rope=SimpleNamespace(a=1))) == described(set_hf(rope=SimpleNamespace(a=1)))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(set_hf(rope_parameters={"rope_type": "yarn", "factor": 4.0}), id="rope scaling"),
        pytest.param(set_hf(text_config={"sliding_window": 512}), id="window of a nested model"),
        pytest.param(set_model(quantization="fp8"), id="weights quantised as they are loaded"),
        pytest.param(set_model(quantization_config={"linear": "fp8"}), id="what of them is quantised"),
        pytest.param(set_model(architecture="TransformersForCausalLM"), id="the class that runs it"),
        pytest.param(set_model(code_revision="v2"), id="the code that comes with it"),
        pytest.param(set_load("dummy"), id="random weights"),
        pytest.param(set_load("tensorizer", tensorizer_uri="s3://a"), id="weights from elsewhere"),
        pytest.param(set_load("pt"), id="other files of the checkpoint"),
        pytest.param(set_media(mm_processor_kwargs={"num_crops": 4}), id="other pictures of an image"),
        pytest.param(set_draft(draft_model()), id="a model that drafts"),
        pytest.param(set_adapters(target_modules=["o_proj"]), id="adapters of some modules only"),
        pytest.param(set_adapters(lora_dtype=torch.float16), id="adapters in another dtype"),
    ],
)
def test_what_changes_the_numbers_is_told(change: Change) -> None:
    assert described(change) != described()


def test_random_weights_are_those_of_their_seed() -> None:
    assert described(set_load("dummy"), set_model(seed=1)) != described(set_load("dummy"))
    assert described(set_model(seed=1)) == described()


@pytest.mark.parametrize("load_format", ["safetensors", "runai_streamer", "fastsafetensors"])
def test_a_faster_way_to_the_same_weights_is_the_same(load_format: str) -> None:
    assert described(set_load(load_format, concurrency=16)) == described()


def test_what_a_loader_was_told_is_not_told_in_clear() -> None:
    config = make_vllm_config()
    set_load("tensorizer", s3_secret_access_key="open sesame")(config)
    assert "sesame" not in repr(describe_model(config))
    assert described(set_load("tensorizer", uri="a")) != described(set_load("tensorizer", uri="b"))


@pytest.mark.parametrize("place", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("named", [{"rope_type": "longrope"}, {"type": "su"}])
def test_a_rope_that_depends_on_the_longest_request_tells_its_length(place: str, named: dict[str, str]) -> None:
    rope = set_hf(text_config={"layers": [{place: named}]})
    assert described(rope, set_model(max_model_len=8192)) != described(rope)
    assert described(set_model(max_model_len=8192)) == described()


# ---- media ----


@pytest.mark.parametrize(
    "media",
    [
        {"mm_processor_kwargs": {"num_crops": 4}},
        {"media_io_kwargs": {"video": {"num_frames": 40}}},
        {"mm_encoder_attn_dtype": "fp8"},
        {"mm_encoder_attn_backend": "FLASH_ATTN"},
        {"mm_encoder_tp_mode": "data"},
        {"video_pruning_rate": 0.5},
        {"video_pruning_rate": 0.5, "video_pruning_method": "vidcom2"},
    ],
    ids=str,
)
def test_what_an_engine_does_to_all_images_is_told(media: dict[str, Any]) -> None:
    assert described(set_media(**media)) != described(set_media())


def test_caches_of_images_and_the_usual_settings_do_not_matter() -> None:
    assert described(set_media(mm_processor_cache_gb=0)) == described(set_media())
    assert described(set_media(mm_encoder_tp_mode="weights", mm_encoder_attn_backend=None)) == described(set_media())


def test_an_engine_that_numbers_images_is_refused() -> None:
    """Its third image has the name of every other engine's third image."""

    def without_prefix_caching(config: Any) -> None:
        config.cache_config.enable_prefix_caching = False

    with pytest.raises(IdentityError, match=r"does not hash images.*enable prefix caching"):
        described(set_media(mm_processor_cache_gb=0), without_prefix_caching)
    described(set_media(), without_prefix_caching)
    described(without_prefix_caching)


def test_scales_of_an_image_encoder_count_by_content(tmp_path: Path) -> None:
    file = tmp_path / "scales.json"
    change = set_media(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(file))
    with pytest.raises(IdentityError, match="No such file"):
        described(change)
    file.write_text("{}")
    before = described(change)
    assert described(change) == before
    file.write_text('{"layer": 2.0}')
    assert described(change) != before


# ---- drafts ----


def test_drafts_are_known_by_their_weights_too() -> None:
    one = described(set_draft(draft_model()))
    assert described(set_draft(draft_model())) == one
    for other in (
        draft_model(model="acme/other"),
        draft_model(revision="4" * 40),
        draft_model(dtype=torch.float16),
        draft_model(hf_config=HfConfig(rope_theta=50000.0)),
        draft_model(quantization="fp8"),
    ):
        assert described(set_draft(other)) != one


@pytest.mark.parametrize(
    "change",
    [
        change_drafting(method="mtp"),
        change_drafting(look_ahead=3),
        change_drafting(use_eagle_block_drop=lambda: True),
        change_drafting(use_eagle=lambda: True),
    ],
    ids=["method", "look-ahead", "dropped-block", "dropped-block-0.31"],
)
def test_the_way_of_drafting_keeps_engines_apart(change: Change) -> None:
    assert described(change) != described(change_drafting())


def test_an_engine_that_drafts_from_the_prompt_is_like_one_that_does_not() -> None:
    """vLLM then calls the model itself its draft."""
    model = draft_model()
    assert described(set_draft(model, target=model)) == described(set_draft(None)) == described()


def test_an_engine_with_adapters_shares_its_own_answers_with_one_without() -> None:
    assert described(set_adapters(target_modules=None, enable_tower_connector_lora=False)) == described()

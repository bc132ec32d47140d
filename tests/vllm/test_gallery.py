"""Models that vLLM serves, at their published sizes: vLLM's own classes say what each layer keeps, and the connector
takes the cache that vLLM makes of it, accounts for all of its bytes and copies a block of each group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import vllm

from benchmarks.ground.engine_config import EngineSettings, make_config
from benchmarks.ground.flagships import FLAGSHIPS
from benchmarks.ground.models import Model
from kvoffload.errors import ConfigError
from kvoffload.plan.exact import ask_vllm
from kvoffload.plan.model_shape import Keeps, LayerShape, ShapeSettings, read_shape
from tests.kit.plan.asked import Group, ask_all, ask_registry, describe_group
from tests.kit.plan.gallery import GALLERY
from tests.kit.plan.page import PAGE, render_page
from tests.vllm.contract import find_version

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_version(vllm) != (0, 32), reason="the page and the kit are of vLLM 0.32"),
]

UNCACHED = {"DeepSeek-V4.1": 8, "GLM-5-next": 1, "Qwen4-exp": 1}
"""Groups that vLLM never finds again, of the models that have some."""
REPLAYED = {"DeepSeek-V4.1": 128}
"""Tokens that vLLM computes again behind a hit instead of finding their windows."""
BY_VLLM_ALONE = {
    *("DeepSeek-V3.2", "DeepSeek-V4", "DeepSeek-V4.1", "GLM-5-next", "Qwen4-exp", "Kimi-Linear", "Kimi-K3"),
    *("MiniMax-M2", "MiniMax-M3", "gemma-4", "Falcon-H1", "Inkling", "Hunyuan-V4", "dots3", "Step-3.7", "MiMo-V2"),
    "Longcat",
}
"""Models whose layers are not known from the config."""


def count(layers: Iterable[LayerShape]) -> Counter[tuple[Keeps, int, int, int]]:
    return Counter((one.keeps, one.token_bytes, one.tokens, one.state_bytes) for one in layers)


@pytest.mark.parametrize("name", GALLERY)
def test_the_connector_takes_the_cache_that_vllm_makes_of_it(name: str) -> None:
    answer = ask_all()[name]
    assert (answer.refused, answer.idle) == ("", "")
    assert answer.registered == len(answer.groups)


@pytest.mark.parametrize("name", GALLERY)
def test_all_groups_are_found_again_but_those_that_are_listed(name: str) -> None:
    groups = ask_all()[name].groups
    assert sum(not group.prefix_cacheable for group in groups) == UNCACHED.get(name, 0)
    assert max(group.replay_tokens for group in groups) == REPLAYED.get(name, 0)


@pytest.mark.parametrize("name", GALLERY)
def test_what_the_config_alone_says_is_what_vllm_says_or_it_points_to_vllm(name: str) -> None:
    config = GALLERY[name].asked
    if name in BY_VLLM_ALONE:
        with pytest.raises(ConfigError, match=r"run it with --exact where vLLM is installed$"):
            read_shape(config, ShapeSettings())
    else:
        assert count(read_shape(config, ShapeSettings()).layers) == count(ask_all()[name].layers)


@pytest.mark.parametrize("model", FLAGSHIPS, ids=lambda model: model.name)
def test_the_proving_ground_makes_the_groups_that_vllms_classes_make(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    alone = replace(model, ranks=1, weight_bytes=0)
    cache = make_config(alone, EngineSettings(), tmp_path).worker
    made = [Group(**describe_group(cache, index)) for index in range(len(cache.kv_cache_groups))]
    expected = ask_all()[model.name].groups
    assert [replace(group, specs=tuple(group.specs)) for group in made] == expected


def test_a_process_for_one_model_gives_the_answer_of_the_one_for_all() -> None:
    name = "DeepSeek-V4"
    assert count(ask_vllm(GALLERY[name].asked, ShapeSettings()).layers) == count(ask_all()[name].layers)


def test_the_page_has_these_answers() -> None:
    assert render_page(PAGE.read_text(), ask_all()) == PAGE.read_text(), "`make gallery` writes it again"


@pytest.mark.campaign
def test_the_connector_takes_every_architecture_that_the_defaults_of_its_class_suffice_for() -> None:
    answers = ask_registry()
    assert len(answers) > 60
    assert {name: reason for name, reason in answers.items() if reason} == {}

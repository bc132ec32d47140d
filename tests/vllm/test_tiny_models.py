"""The tiny models on the real engine: what later tests take for granted about them."""

from __future__ import annotations

import pytest

from tests.vllm.engine import CacheShape, EnginePool, cache_shapes, make_prompt
from tests.vllm.tiny_deepseek_v4 import DEEPSEEK_V4
from tests.vllm.tiny_models import ALL_MODELS, DENSE, TinyModel

pytestmark = pytest.mark.vllm

# The scope makes pytest run all tests of one model, then those of the next: one engine start for each.
each_model = pytest.mark.parametrize("model", [*ALL_MODELS, DEEPSEEK_V4], ids=lambda model: model.name, scope="module")


def prompt_of(model: TinyModel, seed: int) -> list[int]:
    """Two whole blocks and a piece of a third."""
    return make_prompt(seed, 2 * model.block_size + model.block_size // 2)


@each_model
def test_engine_has_the_groups_of_the_table(engines: EnginePool, model: TinyModel) -> None:
    (shape,) = cache_shapes(engines.acquire(model))
    expected = CacheShape(
        num_blocks=shape.num_blocks, hash_block_size=model.hash_block_size, layout=model.layout, groups=model.groups
    )
    assert shape == expected


@each_model
def test_second_run_of_a_prompt_hits_every_whole_block(engines: EnginePool, model: TinyModel) -> None:
    engine, prompt = engines.acquire(model), prompt_of(model, seed=1)
    cold, warm = engine.generate(prompt), engine.generate(prompt)
    assert cold.num_cached_tokens == 0
    assert warm.num_cached_tokens == (2 * model.block_size if model.has_local_prefix_cache else 0)


@each_model
def test_two_hits_give_equal_logprobs(engines: EnginePool, model: TinyModel) -> None:
    """The measure for restored blocks: a cold run rounds differently, a hit of the engine's own does not."""
    engine, prompt = engines.acquire(model), prompt_of(model, seed=2)
    engine.generate(prompt)
    first, second = (engine.generate(prompt, logprobs=3).outputs[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    assert first.logprobs == second.logprobs


@each_model
def test_output_varies_and_depends_on_the_prompt(engines: EnginePool, model: TinyModel) -> None:
    """A model that repeats one token would let wrong KV bytes pass."""
    engine = engines.acquire(model)
    outputs = [tuple(engine.generate(prompt_of(model, seed), max_tokens=24).outputs[0].token_ids) for seed in (3, 4)]
    assert outputs[0] != outputs[1]
    assert all(len(set(tokens)) > 4 for tokens in outputs)


@each_model
def test_no_prefix_outlives_a_test(engines: EnginePool, model: TinyModel) -> None:
    prompt = prompt_of(model, seed=5)
    engines.acquire(model).generate(prompt)
    assert engines.acquire(model).generate(prompt).num_cached_tokens == 0


def test_text_goes_in_and_out_through_the_saved_tokenizer(engines: EnginePool) -> None:
    from vllm import SamplingParams

    engine = engines.acquire(DENSE, skip_tokenizer_init=False)
    output = engine.llm.generate("The engine asks", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0]
    assert engine.llm.get_tokenizer().decode(output.prompt_token_ids) == "The engine asks"
    assert output.outputs[0].text

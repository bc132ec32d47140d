"""Requests that carry something else than tokens, or want something else than one answer: each is restored exactly, or
left to the engine. `test_withdrawn.py` has those that want logprobs of a prompt, `test_images.py` those with images."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import Engine, EnginePool, make_prompt, make_sampling
from tests.vllm.equality import Answer, read_answer
from tests.vllm.tiny_models import DENSE, INIT_STD
from tests.vllm.workload import noting_misses

pytestmark = pytest.mark.vllm

LENGTH, HIT = 641, 640
WIDTH = 256
"""Numbers in an embedding of the dense model."""


def acquire(engines: EnginePool) -> Engine:
    return engines.acquire(
        DENSE, kv_transfer_config=probe.transfer(), skip_tokenizer_init=False, enable_prompt_embeds=True
    )


def acquire_pooling(engines: EnginePool, **arguments: Any) -> Engine:
    return engines.acquire(
        DENSE, kv_transfer_config=probe.transfer(), skip_tokenizer_init=False, runner="pooling", **arguments
    )


def check_restored(engine: Engine, ask: Callable[[], Any], *, loaded: list[int]) -> Any:
    """Checks that an answer to which these loads were brought equals that of the engine's own hit, and returns it."""
    ask()
    local = ask()
    engine.reset_local()
    with probe.watch_loads(engine) as loads:
        restored = ask()
    assert loads == loaded
    assert restored == local
    assert probe.faults(engine) == {}
    return restored


# ---- prompts of embeddings ----


def make_embeddings(seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return (INIT_STD * torch.randn(LENGTH, WIDTH, generator=generator)).to(torch.bfloat16)


def ask_embeddings(engine: Engine, embeddings: Any) -> Answer:
    prompt: Any = {"prompt_embeds": embeddings}
    (output,) = engine.llm.generate(prompt, make_sampling(max_tokens=8, logprobs=3), use_tqdm=False)
    return read_answer(output)


def test_a_prompt_of_embeddings_is_restored(engines: EnginePool) -> None:
    engine, embeddings = acquire(engines), make_embeddings(1)
    right = check_restored(engine, lambda: ask_embeddings(engine, embeddings), loaded=[HIT])
    (*_, last) = probe.entries(engine)
    engine.reset_local()
    with probe.zeroed(engine, last):
        assert ask_embeddings(engine, embeddings) != right


def test_another_number_in_an_embedding_is_a_miss_from_its_block_on(engines: EnginePool) -> None:
    engine, embeddings = acquire(engines), make_embeddings(1)
    other = embeddings.clone()
    other[300, 7] += 1
    ask_embeddings(engine, embeddings)
    local = ask_embeddings(engine, other)
    engine.forget()
    ask_embeddings(engine, embeddings)
    engine.reset_local()
    with probe.watch_loads(engine) as loads:
        assert ask_embeddings(engine, other) == local
        # vLLM has tokens of the number 0 where there are embeddings.
        assert engine.generate([0] * LENGTH).num_cached_tokens == 0
    assert (local.cached, loads) == (256, [256])


# ---- several answers, and answers of a form ----


def test_all_answers_to_one_prompt_are_those_after_the_engines_own_hit(engines: EnginePool) -> None:
    from vllm import SamplingParams

    engine, prompt = acquire(engines), make_prompt(seed=1, length=LENGTH)
    sampling = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, detokenize=False)

    def ask() -> list[tuple[int, ...]]:
        (output,) = engine.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return [tuple(answer.token_ids) for answer in output.outputs]

    answers = check_restored(engine, ask, loaded=[HIT])
    assert len(set(answers)) == 3


def test_a_search_over_beams_is_that_after_the_engines_own_hit(engines: EnginePool) -> None:
    from vllm.sampling_params import BeamSearchParams

    engine, prompt = acquire(engines), make_prompt(seed=2, length=LENGTH)
    search = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)

    def ask() -> list[tuple[tuple[int, ...], float]]:
        (output,) = engine.llm.beam_search([{"prompt_token_ids": prompt}], search)
        return [(tuple(beam.tokens[LENGTH:]), beam.cum_logprob) for beam in output.sequences]

    beams = check_restored(engine, ask, loaded=[HIT])
    assert len({tokens for tokens, _ in beams}) == 3


def test_an_answer_of_a_given_form_is_that_after_the_engines_own_hit(engines: EnginePool) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    engine, prompt = acquire(engines), make_prompt(seed=3, length=LENGTH)
    sampling = make_sampling(max_tokens=8, logprobs=3)
    sampling.structured_outputs = StructuredOutputsParams(regex="[a-z ]{200}")

    def ask() -> Answer:
        (output,) = engine.llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
        return read_answer(output)

    answer = check_restored(engine, ask, loaded=[HIT])
    assert re.fullmatch("[a-z ]+", engine.llm.get_tokenizer().decode(answer.tokens))


# ---- pooling ----


def test_a_pooled_prompt_is_restored(engines: EnginePool) -> None:
    engine, prompt = acquire_pooling(engines), make_prompt(seed=4, length=LENGTH)
    right = check_restored(engine, lambda: embed(engine, prompt), loaded=[HIT])
    (*_, last) = probe.entries(engine)
    engine.reset_local()
    with probe.zeroed(engine, last):
        assert embed(engine, prompt) != right


def embed(engine: Engine, prompt: list[int]) -> list[float]:
    (output,) = engine.llm.embed({"prompt_token_ids": prompt}, use_tqdm=False)
    return output.outputs.embedding


def test_a_score_of_two_texts_is_that_after_the_engines_own_hit(engines: EnginePool) -> None:
    engine = acquire_pooling(engines)
    texts = ["The engine asks for a prefix. " * 40, "Seven grey boats lay in the harbour. " * 40]

    def ask() -> float:
        (output,) = engine.llm.score(*texts, use_tqdm=False)
        return output.outputs.score

    lengths = [len(engine.llm.get_tokenizer().encode(text)) for text in texts]
    check_restored(engine, ask, loaded=[(length - 1) // DENSE.block_size * DENSE.block_size for length in lengths])


def test_a_prompt_of_which_all_tokens_are_pooled_is_computed_whole_and_saved(engines: EnginePool) -> None:
    engine = acquire_pooling(engines, pooler_config={"task": "token_embed"})
    prompt = make_prompt(seed=5, length=LENGTH)

    def ask() -> list[list[float]]:
        (output,) = engine.llm.encode({"prompt_token_ids": prompt}, pooling_task="token_embed", use_tqdm=False)
        return output.outputs.data.tolist()

    assert len(check_restored(engine, ask, loaded=[])) == LENGTH
    assert len(probe.entries(engine)) == HIT // DENSE.block_size
    with noting_misses(engine) as misses:
        ask()
    assert misses == {"skipped": LENGTH}

"""A model whose weights mean something: a conversation in words, with the engine's cache lost before each turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm import connector_probe as probe
from tests.vllm.engine import EnginePool, cache_shapes
from tests.vllm.equality import answer, restorable
from tests.vllm.smollm2 import MISSING, SMOLLM2, is_installed

pytestmark = [pytest.mark.vllm, pytest.mark.skipif(not is_installed(), reason=MISSING)]

QUESTIONS = (
    "What is the capital of France?",
    "Tell me in three sentences what one can see there.",
    "How would I get there from Berlin?",
)


def ask(tokenizer: Any, talk: list[dict[str, str]]) -> list[int]:
    """Returns the tokens of a conversation as the model was trained to read it."""
    text = tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tokens


def test_a_conversation_in_words_goes_on_from_restored_blocks(engines: EnginePool) -> None:
    """Thirty layers in bfloat16; a whole turn of the conversation exceeds a block of 128 tokens. The first answer
    is that of the engine without a connector: which words it has depends on the processor's kernels."""
    alone = engines.acquire(SMOLLM2)
    first_prompt = ask(alone.llm.get_tokenizer(), [{"role": "user", "content": QUESTIONS[0]}])
    without_us = answer(alone, first_prompt, max_tokens=96)
    engine = engines.acquire(SMOLLM2, kv_transfer_config=probe.transfer())
    assert [shape.groups for shape in cache_shapes(engine)] == [SMOLLM2.groups]
    tokenizer = engine.llm.get_tokenizer()
    talk: list[dict[str, str]] = []
    restored_tokens = 0
    for question in QUESTIONS:
        talk.append({"role": "user", "content": question})
        prompt = ask(tokenizer, talk)
        first = answer(engine, prompt, max_tokens=96)
        local = answer(engine, prompt, max_tokens=24)
        engine.reset_local()
        restored = answer(engine, prompt, max_tokens=24)
        assert restored == local, question
        assert restored.cached == local.cached == restorable(SMOLLM2, len(prompt)), question
        restored_tokens += restored.cached
        said = tokenizer.decode(first.tokens, skip_special_tokens=True)
        if question == QUESTIONS[0]:
            assert first.tokens == without_us.tokens
        talk.append({"role": "assistant", "content": said})
    assert restored_tokens >= 3 * 128
    assert probe.faults(engine) == {}

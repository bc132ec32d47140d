"""The requests of an audit, also to engines that lack a part of what it needs."""

from __future__ import annotations

import pytest

from kvoffload.audit.audited_engine import EMPTY_WAITS_S, LIKELIEST, AuditedEngine
from kvoffload.warm.json_client import AnswerError, JsonClient
from tests.kit.audit.caching_engine import MODEL, CachingEngine, caching_engine

PROMPT = [*range(40)]


def make(engine: CachingEngine, waits: list[float] | None = None) -> AuditedEngine:
    client = JsonClient(engine.address, wait=lambda seconds: None)
    return AuditedEngine(client, model=MODEL, answer_tokens=4, wait=(waits or []).append)


def test_the_likeliest_answer_is_asked_for_with_its_logprobs() -> None:
    with caching_engine(CachingEngine()) as played:
        engine = make(played)
        assert len(engine.ask(PROMPT).steps) == 4
        assert engine.ask("a text", salt="some").cached == 0
    assert played.asked[0] == {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 4,
        "temperature": 0,
        "seed": 0,
        "logprobs": LIKELIEST,
        "return_tokens_as_token_ids": True,
        "ignore_eos": True,
        "stream": False,
    }
    assert played.asked[1]["cache_salt"] == "some"


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_the_engines_own_cache_is_emptied_once_its_blocks_are_free(path: str) -> None:
    with caching_engine(CachingEngine(emptying=path, busy=3)) as played:
        engine = make(played)
        engine.ask(PROMPT)
        own = engine.ask(PROMPT)
        engine.empty()
        assert (own.cached, played.emptied) == (32, 4)
        assert engine.count_restored() == 0
        assert engine.ask(PROMPT) == own
        assert engine.count_restored() == 32


def test_blocks_that_stay_in_use_are_waited_for_a_bounded_time() -> None:
    waits: list[float] = []
    with caching_engine(CachingEngine(busy=1000)) as played:
        client = JsonClient(played.address)
        engine = AuditedEngine(client, model=MODEL, answer_tokens=4, wait=waits.append)
        with pytest.raises(AnswerError, match="blocks of it are in use"):
            engine.empty()
    assert waits == [*EMPTY_WAITS_S, 0.0]


def test_an_engine_that_cannot_be_emptied_says_what_is_missing() -> None:
    with caching_engine(CachingEngine(emptying="/none")) as played:
        with pytest.raises(AnswerError, match=r"VLLM_SERVER_DEV_MODE=1, nor SGLang's /flush_cache"):
            make(played).empty()
        assert played.emptied == 0


@pytest.mark.parametrize("counter", ["nan", "inf", "many", "1e999"])
def test_a_counter_that_is_no_number_is_none(counter: str) -> None:
    with caching_engine(CachingEngine(counter=counter)) as played:
        assert make(played).count_restored() is None
    with caching_engine(CachingEngine(counts_hits=False)) as played:
        assert make(played).count_restored() is None

"""Where hits end is counted as a person would count it, and as vLLM's scheduler does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.finer_hits import WAYS, Turn, count_hits, find_geometry, find_turns, list_agents
from benchmarks.ground.models import DEEPSEEK_V3, GPT_OSS_120B, QWEN3_NEXT_80B, Model
from benchmarks.ground.work import Ask, make_agents
from kvoffload.cache.trace import TraceRequest


def ask(tokens: int, answer: int, *blocks: int) -> TraceRequest:
    return TraceRequest(timestamp_ms=0.0, input_length=tokens, output_length=answer, hash_ids=blocks)


def shared(*requests: TraceRequest) -> list[int]:
    return [turn.shared for turn in find_turns(requests)]


FIRST = ask(1100, 101, 0, 1, 2)
"""Two full blocks, and a third one that its answer goes on in: 1,200 tokens have KV."""


@pytest.mark.parametrize(
    ("follower", "expected"),
    [
        pytest.param(ask(2000, 10, 0, 1, 3, 4), 1200, id="goes on with the answer"),
        pytest.param(ask(1150, 10, 0, 1, 3), 1024, id="too short for the answer"),
        pytest.param(ask(2000, 10, 0, 5, 6, 7), 512, id="begins alike"),
        pytest.param(ask(2000, 10, 8, 1, 3, 4), 0, id="begins otherwise"),
    ],
)
def test_what_a_request_shares_with_the_one_before(follower: TraceRequest, expected: int) -> None:
    assert shared(FIRST, follower) == [0, expected]


def test_short_prompts_with_a_common_first_block_are_no_turns_of_each_other() -> None:
    assert shared(ask(600, 10, 0, 1), ask(700, 10, 0, 2)) == [0, 512]


def test_tokens_are_theirs_who_computed_them_first() -> None:
    turns = find_turns([FIRST, ask(2000, 49, 0, 1, 3, 4), ask(1700, 1, 0, 1, 3, 9)])
    assert [list(turn.path) for turn in turns] == [
        [(0, 1200)],
        [(0, 1200), (1, 2048)],
        [(0, 1200), (1, 1536), (2, 1700)],
    ]


CONVERSATION = [
    Turn(tokens=1000, computed=1100, shared=0, path=[(0, 1100)]),
    Turn(tokens=1500, computed=1510, shared=1100, path=[(0, 1100), (1, 1510)]),
]


@pytest.mark.parametrize(
    ("block", "has_states", "expected"),
    [
        # A prompt's last token is computed, and answers are as good as prompts.
        (16, False, {"whole blocks": 1088, "units of 16": 1088, "any token, any state": 1100}),
        (272, False, {"whole blocks": 1088, "units of 16": 1088}),
        (
            272,
            True,
            {
                "whole blocks": 816,
                "the same, all states": 1088,
                "units of 16": 992,
                "the same, all states ": 1088,
                "states of answers' ends too": 1088,
                "any token, any state": 1100,
            },
        ),
        (528, True, {"whole blocks": 528, "the same, all states": 1056, "units of 16": 992}),
    ],
)
def test_hits_end_where_everything_is_kept(block: int, has_states: bool, expected: dict[str, int]) -> None:
    counted = {name: count_hits(CONVERSATION, block=block, has_states=has_states, way=WAYS[name]) for name in expected}
    assert counted == expected


def test_the_same_prompt_again_has_its_last_token_computed() -> None:
    again = [Turn(tokens=512, computed=512, shared=0, path=[(0, 512)])]
    again.append(Turn(tokens=512, computed=512, shared=512, path=[(0, 512), (1, 512)]))
    assert count_hits(again, block=16, has_states=False, way=WAYS["whole blocks"]) == 496
    assert count_hits(again, block=256, has_states=True, way=WAYS["whole blocks"]) == 256
    assert count_hits(again, block=16, has_states=False, way=WAYS["any token, any state"]) == 511


def test_where_prompts_part_a_state_is_kept_for_the_next_one() -> None:
    others = [
        Turn(tokens=5000, computed=5000, shared=shared, path=[(0, shared), (number, 5000)] if shared else [(0, 5000)])
        for number, shared in enumerate((0, 2048, 2048))
    ]
    assert count_hits(others, block=512, has_states=True, way=WAYS["whole blocks"]) == 2048


@pytest.mark.parametrize(("model", "block", "has_states"), [(GPT_OSS_120B, 16, False), (DEEPSEEK_V3, 64, False)])
def test_models_have_the_blocks_that_they_are_deployed_with(model: Model, block: int, has_states: bool) -> None:
    found = find_geometry(model)
    assert (found.block, found.has_states) == (block, has_states)


def make_work() -> list[Ask]:
    """Turns one after the other; two sessions that begin alike."""
    asks = make_agents(2, turns=3, first_tokens=3000, tool_tokens=700, new_tokens=90, think_s=1.0)
    asks.sort(key=lambda ask: int(ask.name.rpartition("-")[2]))
    for before, following in pairwise(asks):
        following.after = before
    return asks


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("whole blocks", {}),
        ("the same, all states", {"prefix_cache_retention_interval": None}),
        ("units of 16", {"prefix_match_unit": 16}),
        ("the same, all states ", {"prefix_match_unit": 16, "prefix_cache_retention_interval": None}),
    ],
)
def test_the_schedulers_own_hits_are_those_that_are_counted(
    name: str, arguments: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from benchmarks.ground.engine_config import EngineSettings
    from benchmarks.ground.trial import open_bare

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = replace(QWEN3_NEXT_80B, extra={**QWEN3_NEXT_80B.extra, **arguments})
    work = make_work()
    with open_bare(model, EngineSettings(is_async=False)) as engine:
        served = engine.serve(work).served
        geometry = find_geometry(model)
        assert (geometry.block, geometry.has_states) == (engine.config.block_size, True)
    turns = find_turns(list_agents(work))
    counted = count_hits(turns, block=geometry.block, has_states=True, way=WAYS[name])
    assert sum(one.cached_tokens for one in served) == counted > 0

"""Work from seeds: what is shared is shared token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.ground.work import (
    come_at,
    count_tokens,
    cut,
    make_agents,
    make_fresh,
    read_conversations,
    repeat,
    write_conversations,
)
from kvoffload.cache.trace import BLOCK_TOKENS


def test_fresh_prompts_share_nothing_and_come_again_with_their_answers() -> None:
    asks = make_fresh(3, tokens=100, new_tokens=5, per_s=1.0)
    assert len({tuple(ask.prompt[:16]) for ask in asks}) == 3
    assert make_fresh(3, tokens=100, new_tokens=5, per_s=1.0)[2].prompt == asks[2].prompt
    for again in repeat(asks, from_s=10.0, new_tokens=2):
        (first,) = [ask for ask in asks if again.name.endswith(ask.name)]
        assert again.prompt[:105] == first.prompt + first.answer
        assert again.arrival_s >= 10.0


def test_a_turn_of_an_agent_has_all_before_it() -> None:
    asks = make_agents(2, turns=3, first_tokens=2500, tool_tokens=50, new_tokens=10, think_s=1.0)
    assert len(asks) == 6
    for ask in asks:
        if ask.after is not None:
            before = ask.after.prompt + ask.after.answer
            assert ask.prompt[: len(before)] == before
            assert len(ask.prompt) == len(before) + 50


def test_a_turn_of_a_trace_goes_on_where_the_one_before_ended(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 700, "output_length": 40, "hash_ids": [0, 1]},
        {"timestamp": 9, "input_length": 1300, "output_length": 5, "hash_ids": [0, 2, 3]},
        {"timestamp": 10, "input_length": 600, "output_length": 5, "hash_ids": [0, 4]},
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second, other = read_conversations(trace, limit=3)
    assert (len(first.prompt), len(second.prompt), len(other.prompt)) == (700, 1300, 600)
    assert second.prompt[:740] == first.prompt + first.answer
    assert other.prompt[:BLOCK_TOKENS] == first.prompt[:BLOCK_TOKENS]


def test_made_conversations_are_like_the_published_ones(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    write_conversations(trace, requests=300)
    asks = read_conversations(trace, limit=300)
    assert len(asks) == 300
    assert 8_000 < count_tokens(asks) / 300 < 16_000
    seen: set[tuple[int, ...]] = set()
    reused = total = 0
    for ask in asks:
        blocks = [tuple(ask.prompt[at : at + 16]) for at in range(0, len(ask.prompt) - 15, 16)]
        reused += sum(block in seen for block in blocks)
        total += len(blocks)
        seen.update(blocks)
    assert 0.25 < reused / total < 0.6


def test_a_rate_is_of_tokens_and_parts_are_of_time(tmp_path: Path) -> None:
    asks = come_at(make_fresh(50, tokens=1000, new_tokens=1, per_s=3.0), tokens_per_s=500.0)
    assert asks[-1].arrival_s == pytest.approx(100.0)
    first, second = cut(asks, 2)
    assert len(first) + len(second) == 50
    assert first[-1].arrival_s < 50.0
    assert second[-1].arrival_s == pytest.approx(50.0)

"""The traces that eviction policies are compared on, and how far the server's policy may be behind on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.eviction import PERCENTS, SHIFTED, Comparison, compare, compare_after_half, list_traces
from benchmarks.evictions.after_shift import WINDOWS, AfterShift
from benchmarks.evictions.traces import GENERATED, Agents, Chat, Loop, Questions, Scans, Shift, describe
from kvoffload.cache.benefit import PrefillCost
from kvoffload.cache.replay import OPTIMUM

SHARED_TRACE = Path(__file__).resolve().parents[3] / "shared" / "traces" / "conversation.jsonl"


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_makes_one_trace(name: str) -> None:
    make = GENERATED[name]
    trace = make(3)
    assert trace == make(3)
    assert trace != make(4)
    assert all(trace)


@pytest.mark.parametrize("name", GENERATED)
def test_equal_blocks_stand_behind_equal_blocks(name: str) -> None:
    before: dict[int, int] = {}
    for request in GENERATED[name](5):
        for parent, block in zip((-1, *request), request, strict=False):
            assert before.setdefault(block, parent) == parent


def test_sessions_come_one_request_a_step() -> None:
    trace = Chat(requests=500, pause=20).make(1)
    assert len(trace) == 500
    assert Agents(requests=500).make(1) != trace
    # A conversation goes on: most requests begin as an earlier one ended.
    ends = {request[-1] for request in trace}
    assert sum(any(block in ends for block in request[:-1]) for request in trace) > 250


def test_scans_and_the_second_half_share_no_block_with_the_rest() -> None:
    chat = {block for request in Chat(requests=400).make(2) for block in request}
    scans = Scans(requests=400, every=200, scanned=5).make(2)
    assert sum(chat.isdisjoint(request) for request in scans) == 10
    shift = Shift(first=Chat(requests=300), second=Chat(requests=300)).make(2)
    assert {block for request in shift[:300] for block in request}.isdisjoint(
        block for request in shift[300:] for block in request
    )


def test_questions_are_as_many_as_in_the_trace_that_they_stand_for() -> None:
    assert describe(Questions().make(1)) == "3,993 requests, 121,896 uses of 41,702 blocks, 24,188 of them once"


def test_points_are_counted_from_the_best_of_the_others() -> None:
    rates = {"lru": [10.0, 20.0], "arc": [11.0, 19.0], "prefix": [10.5, 21.0], OPTIMUM: [30.0, 40.0]}
    saved = {"lru": [10.0, 20.0], "arc": [8.0, 8.0], "prefix": [9.0, 24.0], OPTIMUM: [8.0, 8.0]}
    found = Comparison(trace="a", is_hybrid=False, rates=rates, saved=saved)
    assert found.above_best == [-0.5, 1.0]
    assert found.saved_above_best == [-1.0, 4.0]


def test_saved_time_is_the_hit_rate_where_all_tokens_cost_the_same() -> None:
    found = compare("chat", Chat(requests=300).make(1), cost=PrefillCost(token_us=1.0, growth_us=0.0))
    assert found.saved.keys() == found.rates.keys()
    assert all(found.saved[policy] == pytest.approx(rates) for policy, rates in found.rates.items())
    dearer = compare("chat", Chat(requests=300).make(1), cost=PrefillCost(token_us=1.0, growth_us=9.0))
    assert dearer.rates == found.rates
    assert dearer.saved["prefix"] != pytest.approx(found.saved["prefix"])


def test_a_named_trace_is_halved_and_turned(tmp_path: Path) -> None:
    file = tmp_path / "small.jsonl"
    file.write_text(
        "".join(
            f'{{"timestamp": {at}, "input_length": 1024, "output_length": 1, "hash_ids": [{at}, 7]}}\n'
            for at in range(4)
        )
    )
    traces = dict(list_traces(file, seed=1))
    assert traces["small"] == [(0, 7), (1, 7), (2, 7), (3, 7)]
    assert traces["small, first half"] + traces["small, second half"] == traces["small"]
    assert traces["small, backwards"] == traces["small"][::-1]
    assert traces.keys() > GENERATED.keys()


def test_a_policy_is_near_when_two_windows_in_a_row_are_within_a_point() -> None:
    found = AfterShift(
        rates={"lru": [8.0, 9.0, 4.0, 9.0, 9.0], "arc": [5.0, 9.5, 6.0, 3.0, 3.0], "prefix": [2.0, 9.0, 3.0, 8.5, 9.5]},
        window_percent=5.0,
    )
    assert found.above_best("prefix") == [-6.0, -0.5, -3.0, -0.5, 0.5]
    assert found.near_after_percent("prefix") == 15.0
    assert found.near_after_percent("lru") == 0.0
    assert found.near_after_percent("arc") == 5.0
    far = AfterShift(rates={"lru": [8.0, 8.0], "prefix": [7.5, 6.5]}, window_percent=5.0)
    assert far.near_after_percent("prefix") == 10.0


def test_windows_after_a_shift_add_up_to_its_half() -> None:
    trace = Shift(first=Chat(requests=200), second=Chat(requests=200)).make(2)
    (found,) = compare_after_half(trace, percents=(100,))
    assert found.window_percent == 5.0
    assert {len(rates) for rates in found.rates.values()} == {WINDOWS}
    # With memory for all, only what the second half asks for the first time is missed.
    half = trace[200:]
    seen: set[int] = set()
    for window, rate in enumerate(found.rates["lru"]):
        requests = half[20 * window : 20 * window + 20]
        hits = 0
        for request in requests:
            hits += sum(block in seen for block in request)
            seen.update(request)
        assert rate == pytest.approx(100 * hits / sum(map(len, requests)))


def test_the_trace_with_a_shift_has_it_half_way() -> None:
    trace = GENERATED[SHIFTED](1)
    half = len(trace) // 2
    assert {block for request in trace[:half] for block in request}.isdisjoint(
        block for request in trace[half:] for block in request
    )


def test_a_loop_that_no_list_of_uses_hits_is_hit() -> None:
    found = compare("loop", Loop(prompts=200, rounds=6).make(1))
    assert found.rates["lru"] == [0.0] * len(PERCENTS)
    assert found.above_best[-1] > 10


@pytest.mark.parametrize("name", GENERATED)
def test_the_servers_policy_is_not_far_behind_on_any_kind_of_traffic(name: str) -> None:
    found = compare(name, GENERATED[name](1))
    assert min(found.above_best) > -1.0
    assert sum(found.above_best) > -1.5


@pytest.mark.skipif(not SHARED_TRACE.exists(), reason="the trace of conversations is not beside the checkout")
def test_the_servers_policy_is_first_on_conversations() -> None:
    requests = next(requests for _, requests in list_traces(SHARED_TRACE, seed=1))
    found = compare("conversation", requests)
    assert min(found.above_best) > -0.2
    assert sum(found.above_best) > 8

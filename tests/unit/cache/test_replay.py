"""Replays against plain-Python models of the same cache, and the parsing of what users type."""

from __future__ import annotations

import random
import threading
from collections import OrderedDict

import numpy as np
import pytest

from kvoffload import native
from kvoffload.cache.benefit import PrefillCost
from kvoffload.cache.replay import OPTIMUM, ReplayResult, pack_trace, parse_capacities, parse_policies, replay
from kvoffload.cache.trace import TraceRequest
from kvoffload.errors import ConfigError


def request(*hash_ids: int, rest: int = 0) -> TraceRequest:
    tokens = 512 * len(hash_ids) - (512 - rest if rest else 0)
    return TraceRequest(timestamp_ms=0, input_length=tokens, output_length=1, hash_ids=hash_ids)


def random_requests(seed: int, *, blocks: int = 200, requests: int = 800) -> list[TraceRequest]:
    """Ways from the root of a random tree to a block, the low numbers busier."""
    rng = random.Random(seed)
    parents = {block: rng.randrange(block) for block in range(1, blocks)}
    made = []
    for _ in range(requests):
        path = [min(rng.randrange(blocks), rng.randrange(blocks))]
        while path[-1]:
            path.append(parents[path[-1]])
        made.append(request(*reversed(path)))
    return made


def lru_hits(requests: list[TraceRequest], capacity: int) -> int:
    """Nothing but a dictionary in the order of use, deeper blocks the older."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for one in requests:
        blocks = one.full_blocks(512)
        present = next((at for at, block in enumerate(blocks) if block not in resident), len(blocks))
        hits += present
        for block in reversed(blocks[:capacity]):
            resident[block] = None
            resident.move_to_end(block)
        while len(resident) > capacity:
            resident.popitem(last=False)
    return hits


def run(requests: list[TraceRequest], capacity_percent: float, *, is_hybrid: bool = False) -> dict[str, ReplayResult]:
    results = replay(
        pack_trace(requests),
        policies=native.policy_names(),
        capacity_percents=[capacity_percent],
        is_hybrid=is_hybrid,
    )
    return {result.policy: result for result in results}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("percent", [10, 30, 60])
def test_lru_agrees_with_a_dictionary(seed: int, percent: int) -> None:
    requests = random_requests(seed)
    result = run(requests, percent)["lru"]
    assert result.hits == lru_hits(requests, result.capacity_units)
    assert result.references == sum(len(one.hash_ids) for one in requests)


@pytest.mark.parametrize("percent", [2, 10, 40, 100])
def test_nothing_passes_the_optimum(percent: int) -> None:
    results = run(random_requests(9), percent)
    optimum = results.pop(OPTIMUM)
    assert set(results) == set(native.policy_names())
    assert max(result.hits for result in results.values()) <= optimum.hits
    if percent == 100:
        assert {result.hits for result in results.values()} == {optimum.hits}
        assert all(result.useless_share is None for result in results.values())


def test_hand_counted_hits() -> None:
    # The partly filled third block of the first two is dropped; 1 2 4 follows 1 2, so 2 of 3 are served.
    requests = [request(1, 2, 3, rest=10), request(1, 2, 3, rest=10), request(1, 2, 4)]
    results = run(requests, 100)
    assert results["lru"].capacity_units == 3
    assert results["lru"].references == 7
    assert {result.hits for result in results.values()} == {4}
    assert results["lru"].hit_rate == 4 / 7
    # Of 2 + 2 + 3 blocks 2 and 2: the later ones cost more, so less is saved than was hit.
    assert {(result.hit_squares, result.reference_squares) for result in results.values()} == {(8, 17)}
    cost = PrefillCost(token_us=1.0, growth_us=10.0)
    saved_s = (4 * 512 + 8 * 0.01 * 512**2 / 2) / 1e6
    assert results["lru"].saved_s(cost, 512) == pytest.approx(saved_s)
    assert results["lru"].saved_share(cost, 512) == pytest.approx(saved_s / ((7 * 512 + 17 * 0.01 * 512**2 / 2) / 1e6))


def test_hybrid_reuses_at_states_only() -> None:
    prompt = list(range(20))
    requests = [request(*prompt), request(*prompt), request(*prompt[:15]), request(*prompt[:7])]
    results = run(requests, 100, is_hybrid=True)
    assert OPTIMUM not in results
    assert results["lru"].capacity_units == 20 * 4 + 20 * 2 + 2 * 16
    assert {result.hits for result in results.values()} == {0 + 16 + 8 + 0}
    assert {result.hit_squares for result in results.values()} == {256 + 64}


def test_equal_ids_behind_other_ids_are_other_blocks() -> None:
    trace = pack_trace([request(1, 2), request(3, 2)])
    assert (trace.block_count, trace.reference_count, trace.request_count) == (4, 4, 2)


@pytest.mark.parametrize(
    ("ends", "said"),
    [([2, 1], "1 follows 2"), ([1, 4], "not pass the 3 ids"), ([1, 2], "last end must be 3"), ([], "last end")],
)
def test_requests_are_added_all_or_not(ends: list[int], said: str) -> None:
    trace = native.ReplayTrace()
    with pytest.raises(ValueError, match=said):
        trace.add(np.arange(3, dtype=np.uint64), np.array(ends, np.uint64))
    assert trace.request_count == 0


def test_nothing_is_added_while_a_replay_runs() -> None:
    trace = pack_trace(random_requests(1, requests=20_000))
    thread = threading.Thread(target=native.replay_policy, args=(trace, "prefix", 20, False))
    thread.start()
    refused = 0
    while thread.is_alive():
        try:
            trace.add(np.arange(1, dtype=np.uint64), np.ones(1, np.uint64))
        except ValueError as fault:
            refused += "while a replay of it runs" in str(fault)
    thread.join()
    assert refused
    trace.add(np.arange(1, dtype=np.uint64), np.ones(1, np.uint64))


def test_many_requests_are_packed_in_batches() -> None:
    trace = pack_trace(request(number, number) for number in range(3000))
    assert (trace.request_count, trace.block_count) == (3000, 6000)


@pytest.mark.parametrize("requests", [[], [request(1, rest=10)]])
def test_a_trace_without_blocks_is_refused(requests: list[TraceRequest]) -> None:
    with pytest.raises(ConfigError, match="no request with a full block"):
        pack_trace(requests)


def test_policies_by_name() -> None:
    assert parse_policies("all") == native.policy_names()
    assert parse_policies("arc, lru,arc") == ("arc", "lru")


@pytest.mark.parametrize(
    ("text", "said"), [("lur", "did you mean 'lru'"), ("", "known are lru"), ("lru,", "known are")]
)
def test_unknown_policies(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_policies(text)


def test_capacities() -> None:
    assert parse_capacities("1, 2.5,100") == (1.0, 2.5, 100.0)


@pytest.mark.parametrize("text", ["", "1,", "0", "-1", "101", "5%", "nan", "inf"])
def test_bad_capacities(text: str) -> None:
    with pytest.raises(ConfigError, match="above 0 and up to 100"):
        parse_capacities(text)


@pytest.mark.parametrize("policy", native.policy_names())
def test_a_memory_that_is_driven_by_hand_is_the_replay(policy: str) -> None:
    trace = pack_trace(random_requests(3))
    memory = native.ReplayMemory(trace, policy, 20)
    hits = admitted = evicted = 0
    for at in range(trace.request_count):
        blocks = trace.request(at)
        boundary = memory.count_prefix(blocks)
        assert memory.holds(blocks)[: boundary + 1] == b"\1" * boundary + b"\0" * (boundary < len(blocks))
        memory.touch(blocks[:boundary])
        came, went, _ = memory.admit(blocks[boundary:], blocks[:boundary])
        hits, admitted, evicted = hits + boundary, admitted + came, evicted + went
        assert memory.used_blocks == admitted - evicted <= 20
    whole = native.replay_policy(trace, policy, 20, False)
    assert (hits, admitted, evicted) == (whole["hits"], whole["admitted"], whole["evicted"])


def test_a_memory_refuses_what_its_trace_does_not_have() -> None:
    trace = pack_trace([request(1, 2), request(1, 3)])
    assert trace.request(1).tolist() == [0, 2]
    with pytest.raises(IndexError, match="2 requests"):
        trace.request(2)
    with pytest.raises(ValueError, match="nothing"):
        native.ReplayMemory(trace, "nothing", 4)
    memory = native.ReplayMemory(trace, "lru", 4)
    with pytest.raises(IndexError, match="no block 3"):
        memory.touch(np.array([0, 3], np.uint32))
    with pytest.raises(ValueError, match="while a replay of it runs"):
        trace.add(np.array([5], np.uint64), np.array([1], np.uint64))
    del memory
    trace.add(np.array([5], np.uint64), np.array([1], np.uint64))

"""The scheduler side before, during and after the handshake with its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from kvoffload.connector.geometry import EngineCache, describe_cache
from kvoffload.connector.scheduler_side import SchedulerLimits, SchedulerSide
from kvoffload.connector.step_plan import StepPlan, WorkerFacts
from kvoffload.errors import BlockAlignmentError, IdentityError, UnsupportedError
from tests.unit.connector.engine_configs import full, make_config, make_tensors, window
from tests.unit.connector.scripted import make_facts, make_request


def facts(num_blocks: int = 32) -> WorkerFacts:
    config = make_config((["a", "b"], full(4)), (["c", "d"], window(4)), num_blocks=num_blocks)
    cache = EngineCache(config=config, tensors=make_tensors(config), sharing={}, layout="LBHNC", hash_block_size=4)
    return make_facts(describe_cache(cache))


def make_side(
    *, ranks: int = 1, num_blocks: int = 32, memory_bytes: int = 1 << 20, hash_block_size: int = 4
) -> SchedulerSide:
    side = SchedulerSide(
        SchedulerLimits(memory_bytes=memory_bytes, ranks=ranks, hash_block_size=hash_block_size, hit_alignment=4)
    )
    side.bind_pool(BlockPool(num_blocks, enable_caching=True, hash_block_size=4))
    return side


def test_before_the_handshake_everything_is_a_miss() -> None:
    side = make_side()
    request = make_request("a", range(30), hash_block_size=4)
    side.add_request(request)
    assert side.match(request, 0) == 0
    side.plan_load(request, ([], []), 0)
    assert side.plan_step(SchedulerOutput.make_empty()) == StepPlan()
    assert side.rescue_plan() == StepPlan()
    side.end_transfers(finished={"a"}, failed=set(), report=None)
    side.clear()
    side.forget_request(request)
    assert not side.has_pending_work
    assert not side.has_pending_saves


def test_memory_is_shared_by_the_ranks() -> None:
    side = make_side(ranks=2, memory_bytes=4096)
    side.accept_facts({(0, 0): facts(), (0, 1): facts()})
    assert side.index is not None
    assert side.index._capacity_bytes == 2048


def test_a_slot_costs_the_largest_record_of_any_rank() -> None:
    side = make_side(ranks=2)
    small, large = facts(), facts()
    large = replace(large, groups=(replace(large.groups[0], record_bytes=1000), large.groups[1]))
    side.accept_facts({(0, 0): small, (0, 1): large})
    assert side.index is not None
    assert side.index._record_bytes == (1000, 512)


@pytest.mark.parametrize(("num_blocks", "limit"), [(2, 2), (15, 2), (32, 4), (800, 100)])
def test_one_block_in_eight_may_be_pinned_but_always_one_of_each_group(num_blocks: int, limit: int) -> None:
    side = make_side(num_blocks=num_blocks)
    side.accept_facts({(0, 0): facts(num_blocks)})
    assert side._saves is not None
    assert side._saves._pins.limit == limit


def test_ranks_of_different_identity_are_refused_by_the_field_they_differ_in() -> None:
    other = replace(facts(), fingerprint=b"g" * 32, description={"model": "acme/other"})
    with pytest.raises(IdentityError, match=r"\(0, 0\) and \(0, 1\).*model: 'acme/tiny' here, 'acme/other' there"):
        make_side(ranks=2).accept_facts({(0, 0): facts(), (0, 1): other})


def test_ranks_with_different_groups_are_refused() -> None:
    other = facts()
    other = replace(other, groups=tuple(reversed(other.groups)))
    with pytest.raises(IdentityError, match="different KV cache groups"):
        make_side(ranks=2).accept_facts({(0, 0): facts(), (0, 1): other})


def test_a_missing_rank_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="1 of 2 ranks"):
        make_side(ranks=2).accept_facts({(0, 0): facts()})


def test_blocks_that_hashes_do_not_divide_are_refused() -> None:
    with pytest.raises(BlockAlignmentError):
        make_side(hash_block_size=3).accept_facts({(0, 0): facts()})


def test_nothing_of_an_ended_request_stays() -> None:
    side = make_side()
    side.accept_facts({(0, 0): facts()})
    for number in range(100):
        request = make_request(str(number), range(30), hash_block_size=4)
        side.add_request(request)
        side.match(request, 0)
        side.forget_request(request)
    assert side._restores is not None
    assert side._saves is not None
    assert not side._requests
    assert not side._restores._answers
    assert not side._saves._next

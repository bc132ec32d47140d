"""The scheduler side before, during and after the handshake with its ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.output import SchedulerOutput

from kvoffload.connector.common.step_plan import Place, StepPlan
from kvoffload.connector.engine.pipeline import name_pipeline
from kvoffload.connector.identity.agreement import EngineFacts, SharingSettings
from kvoffload.connector.scheduler_side import SchedulerSettings, SchedulerSide
from kvoffload.errors import BlockAlignmentError, IdentityError, ServerError
from kvoffload.protocol import Register
from tests.kit.connector.engine_configs import full, window
from tests.kit.connector.local_client import LocalClient
from tests.kit.connector.scripted import ScriptedEngine, list_moves, make_request, two_groups


class Opening:
    """Opens the cache, and knows with what."""

    def __init__(self) -> None:
        self.registers: list[Register] = []
        self.engines: list[EngineFacts] = []
        self.clients: list[LocalClient] = []

    def __call__(self, register: Register, engine: EngineFacts, on_event: object) -> LocalClient:
        self.registers.append(register)
        self.engines.append(engine)
        self.clients.append(LocalClient(register))
        return self.clients[-1]


def make_side(
    *,
    ranks: int = 1,
    pipeline_ranks: int = 1,
    num_blocks: int = 32,
    hash_block_size: int = 4,
    opening: Opening | None = None,
) -> tuple[SchedulerSide, Opening]:
    sharing = SharingSettings(
        hash_block_size=hash_block_size,
        hash_algorithm="sha256",
        hash_seed="0",
        tensor_ranks=ranks,
        pipeline_ranks=pipeline_ranks,
    )
    opening = opening or Opening()
    side = SchedulerSide(SchedulerSettings(sharing=sharing, hit_alignment=4), opening)
    side.bind_pool(BlockPool(num_blocks, enable_caching=True, hash_block_size=4))
    return side, opening


def test_before_the_handshake_everything_is_a_miss() -> None:
    side, opening = make_side()
    request = make_request("a", range(30), hash_block_size=4)
    side.add_request(request)
    assert side.match(request, 0) == 0
    side.plan_load(request, ([], []), 0)
    assert side.plan_step(SchedulerOutput.make_empty()) == StepPlan()
    assert side.rescue_plan(SchedulerOutput.make_empty()) == StepPlan()
    side.end_transfers({"a"}, set(), None)
    side.doom_load(request)
    side.clear()
    side.end_request(request, ([], []))
    side.close()
    assert not side.has_pending_work
    assert not side.has_pending_saves
    assert opening.registers == []


def test_the_cache_is_opened_with_what_all_ranks_agree_on() -> None:
    side, opening = make_side(ranks=2)
    first, second = two_groups(), two_groups(rank=1)
    side.accept_facts({(0, 0): first, (0, 1): second})
    (register,) = opening.registers
    assert [(group.record_bytes, group.shards) for group in register.groups] == [(512, 2), (512, 2)]
    assert (register.fingerprint, register.ranks) == (first.fingerprint, 2)
    assert opening.engines[0].cache_bytes == first.cache_bytes + second.cache_bytes


def test_the_stages_of_a_pipeline_have_slots_of_their_own_sizes() -> None:
    """Eight tensor ranks in four stages: an entry has eight shards, and the second stage no window."""
    side, opening = make_side(ranks=8, pipeline_ranks=4)
    first = two_groups()
    second = replace(first, groups=(replace(first.groups[0], record_bytes=1000),), fingerprint=b"g" * 32)
    side.accept_facts(
        {
            (stage, rank): replace(second if stage == 1 else first, rank=8 * stage + rank)
            for stage in range(4)
            for rank in range(8)
        }
    )
    (register,) = opening.registers
    assert [(group.record_bytes, group.shards) for group in register.groups] == [
        *((512, 8), (1000, 8), (512, 8), (512, 8)),
        *((512, 8), (512, 8), (512, 8)),
    ]
    assert register.ranks == 32
    assert side.parts is not None
    assert side.parts.groups.of_table == {0: 0, 1: 4}


@pytest.mark.parametrize(("num_blocks", "limit"), [(2, 2), (15, 3), (32, 8), (800, 200), (10**6, 10**6 // 8)])
def test_some_blocks_may_be_pinned_but_always_one_of_each_group(num_blocks: int, limit: int) -> None:
    side, _ = make_side(num_blocks=num_blocks)
    side.accept_facts({(0, 0): two_groups(num_blocks)})
    assert side.parts is not None
    assert side.parts.pins.limit == limit


def test_ranks_that_differ_are_refused_before_the_cache_is_opened() -> None:
    side, opening = make_side(ranks=2)
    with pytest.raises(IdentityError):
        side.accept_facts({(0, 0): two_groups(), (0, 1): replace(two_groups(rank=1), fingerprint=b"g" * 32)})
    assert opening.registers == []


def test_blocks_that_hashes_do_not_divide_are_refused_before_the_cache_is_opened() -> None:
    side, opening = make_side(hash_block_size=3)
    with pytest.raises(BlockAlignmentError):
        side.accept_facts({(0, 0): two_groups()})
    assert opening.registers == []


def test_a_cache_that_refuses_the_engine_keeps_it_from_starting() -> None:
    class Refusing(Opening):
        def __call__(self, register: Register, engine: EngineFacts, on_event: object) -> LocalClient:
            raise ServerError("refused", remedy="ask somebody else")

    side, _ = make_side(opening=Refusing())
    with pytest.raises(ServerError):
        side.accept_facts({(0, 0): two_groups()})
    assert side.plan_step(SchedulerOutput.make_empty()) == StepPlan()


def test_the_first_request_of_a_pipeline_is_served_where_all_stages_joined_when_they_registered() -> None:
    side, opening = make_side(pipeline_ranks=2)
    place = Place(1, 2)
    first, second = (
        replace(two_groups(), places=(place,)),
        replace(two_groups(rank=1), fingerprint=b"g" * 32, places=(place,)),
    )
    side.accept_facts({(0, 0): first, (1, 0): second})
    assert opening.registers[0].fingerprint == name_pipeline([first.fingerprint, second.fingerprint])
    assert side.parts is not None
    assert side.parts.places.has_all(place)
    assert side.plan_step(SchedulerOutput.make_empty()) == StepPlan()


def test_nothing_of_an_ended_request_stays() -> None:
    side, opening = make_side()
    side.accept_facts({(0, 0): two_groups()})
    for number in range(100):
        request = make_request(str(number), range(30), hash_block_size=4)
        side.add_request(request)
        side.match(request, 0)
        side.end_request(request, ([], []))
    assert side.parts is not None
    assert not side.requests
    assert not side.parts.restores.questions
    assert not side.parts.restores.failed
    assert opening.clients[0].stats().leases == 0


def test_a_request_that_nobody_announced_is_a_miss() -> None:
    side, _ = make_side()
    side.accept_facts({(0, 0): two_groups()})
    request = make_request("a", range(30), hash_block_size=4)
    assert side.match(request, 0) == 0
    side.plan_load(request, ([], []), 8)
    side.end_request(request, ([], []))
    assert side.plan_step(SchedulerOutput.make_empty()) == StepPlan()


def test_the_end_closes_the_cache() -> None:
    engine = ScriptedEngine((["a"], full(4)))
    engine.serve("a", range(30))
    engine.forget()
    engine.arrive("b", range(30))
    assert engine.cache.stats().leases == 1
    engine.connector.shutdown()
    assert engine.cache.is_closed
    assert engine.cache.stats().leases == 0


@pytest.mark.parametrize("is_reset", [False, True])
@pytest.mark.parametrize(
    ("owner", "asker", "expected"),
    [("", "", 28), ("one", "one", 28), ("one", "other", 0), ("one", "", 0), ("", "one", 0)],
)
def test_what_one_tenant_has_saved_is_found_by_no_other(owner: str, asker: str, expected: int, is_reset: bool) -> None:
    engine = ScriptedEngine((["a"], full(4)))
    if is_reset:
        engine.connector.reset_cache()
    request = engine.arrive("first", range(30), tenant=owner)
    engine.admit(request)
    engine.report(engine.step())
    engine.finish(request)
    engine.forget()
    assert engine.match(engine.arrive("second", range(30), tenant=asker)) == expected


def test_tenants_do_not_keep_each_other_from_saving() -> None:
    engine = ScriptedEngine((["a"], full(4)))
    for tenant in ("one", "other"):
        request = engine.arrive(tenant, range(30), tenant=tenant)
        engine.admit(request)
        engine.report(engine.step())
        engine.finish(request)
        engine.forget()
    assert len({one.name for one in engine.cache.published}) == 14


def test_a_reset_hides_what_a_tenant_has_saved() -> None:
    engine = ScriptedEngine((["a"], full(4)))
    request = engine.arrive("first", range(30), tenant="one")
    engine.admit(request)
    engine.report(engine.step())
    engine.finish(request)
    engine.forget()
    engine.connector.reset_cache()
    assert engine.match(engine.arrive("second", range(30), tenant="one")) == 0


def test_windows_are_kept_where_a_prompt_parts_from_what_is_cached() -> None:
    """The third prompt with the same beginning restores it, although no prompt ever ended there."""
    engine = ScriptedEngine((["a"], full(4)), (["c"], window(4, tokens=6)), retention_interval=0, num_blocks=256)
    shared = range(22)
    engine.serve("first", [*shared, *range(100, 130)])
    engine.forget()
    assert engine.match(engine.arrive("second", [*shared, *range(200, 230)])) == 0
    engine.finish(engine.requests["second"])
    engine.serve("third", [*shared, *range(300, 330)])
    engine.forget()
    assert engine.match(engine.arrive("fourth", [*shared, *range(400, 430)])) == 20


@pytest.mark.parametrize("policy", ["eager", "on_evict"])
@pytest.mark.parametrize("was_preempted", [False, True])
def test_who_ends_before_it_has_run_in_its_blocks_saves_nothing(policy: str, was_preempted: bool) -> None:
    """Another connector is loading into them: what the engine counts as computed is not there yet."""
    engine = ScriptedEngine((["a"], full(4)), extra={"save_policy": policy})
    request = engine.arrive("a", range(30))
    if was_preempted:
        engine.cache.slots_left = 0
        engine.admit(request)
        engine.step()
        engine.preempt(request)
        engine.forget()
        engine.cache.slots_left = None
    assert engine.match(request) == 0
    assert engine.manager.allocate_slots(request, 0, num_external_computed_tokens=28, delay_cache_blocks=True)
    engine.connector.update_state_after_alloc(request, engine.manager.get_blocks("a"), 0)
    request.num_computed_tokens = 28
    assert engine.step().saves == ()
    engine.finish(request)
    assert engine.pinned == 0
    assert engine.step().saves == ()
    engine.assert_at_rest()


def test_what_another_connector_has_loaded_is_saved_once_it_runs() -> None:
    engine = ScriptedEngine((["a"], full(4)))
    request = engine.arrive("a", range(30))
    assert engine.match(request) == 0
    assert engine.manager.allocate_slots(request, 0, num_external_computed_tokens=28, delay_cache_blocks=True)
    engine.connector.update_state_after_alloc(request, engine.manager.get_blocks("a"), 0)
    request.num_computed_tokens = 28
    assert engine.step().saves == ()
    engine.manager.cache_blocks(request, 28)
    assert engine.run(request)
    assert len(list_moves(*engine.step().saves)) == 7

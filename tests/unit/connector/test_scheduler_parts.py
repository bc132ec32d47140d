"""The parts of the scheduler side, by the settings that it is given."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.v1.core.block_pool import BlockPool

from kvoffload.connector.common.step_plan import Place, StepPlan, WorkerFacts, WorkerReport
from kvoffload.connector.engine import vllm_compat
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.identity.agreement import EngineFacts, SharingSettings
from kvoffload.connector.saves.eviction_watch import Auto, EvictionWatch
from kvoffload.connector.saves.policy import Eager, SecondUse
from kvoffload.connector.scheduler_parts import FormerMemories, RankPlaces, SchedulerParts, SchedulerSettings, assemble
from kvoffload.protocol import Register
from tests.kit.connector.local_client import MEMORY, LocalClient
from tests.kit.connector.nodes import Nodes
from tests.kit.connector.saving import DENSE, make_engine
from tests.kit.connector.scripted import ScriptedEngine, two_groups

NUM_BLOCKS = 32
SHARING = SharingSettings(hash_block_size=4, hash_algorithm="sha256", hash_seed="0", tensor_ranks=1, pipeline_ranks=1)


class Opening:
    """Opens the cache, and knows who was to hear of its events."""

    def __init__(self, *, is_there: bool = True, pool_bytes: int = MEMORY.memory_bytes) -> None:
        self._is_there = is_there
        self._memory = replace(MEMORY, memory_bytes=pool_bytes, segment_bytes=pool_bytes, extent_bytes=2 << 10)
        self.heard_by: Any = None

    def __call__(self, register: Register, engine: EngineFacts, on_event: Any) -> LocalClient:
        self.heard_by = on_event
        return LocalClient(register, self._memory) if self._is_there else Absent(register)


class Absent(LocalClient):
    """A server that is not there yet."""

    memory_id = 0


def put_together(
    opening: Opening | None = None,
    *,
    sharing: SharingSettings = SHARING,
    facts: WorkerFacts | None = None,
    **settings: Any,
) -> SchedulerParts:
    return assemble(
        {(0, 0): facts or two_groups(NUM_BLOCKS)},
        SchedulerSettings(sharing=sharing, hit_alignment=4, **settings),
        pool=BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=4),
        open_cache=opening or Opening(),
        measures=Measures(),
        clock=lambda: 0.0,
    )


def policy_of(parts: SchedulerParts) -> str:
    assert parts.saves.policy is parts.policy
    return {Auto: "auto", Eager: "eager", EvictionWatch: "on_evict", SecondUse: "second_use"}[type(parts.policy)]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, "auto"),
        ({"save_policy": "eager"}, "eager"),
        ({"save_policy": "on_evict"}, "on_evict"),
        ({"save_policy": "second_use"}, "second_use"),
        ({"save_policy": "on_evict", "has_prefix_cache": False}, "eager"),
        ({"save_policy": "second_use", "has_prefix_cache": False}, "second_use"),
    ],
)
def test_the_policy_is_what_was_wished_for_where_that_can_be(settings: dict[str, Any], expected: str) -> None:
    assert policy_of(put_together(**settings)) == expected


@pytest.mark.parametrize(
    ("step_tokens", "requests", "under_way", "expected"),
    [(8, 1, 1, 24), (4, 0, 1, 8), (4, 0, 2, 16), (8192, 256, 2, NUM_BLOCKS)],
)
def test_the_queue_is_watched_as_far_as_the_steps_under_way_can_take(
    step_tokens: int, requests: int, under_way: int, expected: int
) -> None:
    settings = {"step_tokens": step_tokens, "max_requests": requests, "steps_under_way": under_way}
    watch = put_together(save_policy="on_evict", **settings).policy
    assert isinstance(watch, EvictionWatch)
    assert watch.look_ahead == expected


def test_memories_of_blocks_are_bounded_by_the_engines_size() -> None:
    second_use = put_together(save_policy="second_use").policy
    assert isinstance(second_use, SecondUse)
    for number in range(1000):
        second_use.seen.see(0, number.to_bytes(32, "big"), "a")
    assert 4 * NUM_BLOCKS <= len(second_use.seen) <= 8 * NUM_BLOCKS


def test_events_are_heard_if_somebody_wants_them() -> None:
    opening = Opening()
    parts = put_together(opening)
    assert parts.events is opening.heard_by is None
    parts = put_together(opening, event_kinds=())
    assert parts.events is not None
    parts.events.close()
    assert opening.heard_by == parts.events.hear


@pytest.mark.parametrize(("interval", "expected"), [(0, 0), (16, 16), (None, None), (18, 0)])
def test_windows_are_retained_as_the_engine_does(interval: int | None, expected: int | None) -> None:
    """It retains none at boundaries at which it has no hits."""
    assert put_together(retention_interval=interval).worth.interval == expected


def test_rounds_and_drafts_are_those_of_the_engine() -> None:
    parts = put_together(decoded_tokens=5, round_steps=3, gathered_tokens=9)
    assert (parts.saves.look_out.decoded_tokens, parts.saves.look_out.round_steps) == (5, 3)
    assert parts.worth.begin(prompt_tokens=40).decoded_due == 8


@pytest.mark.parametrize(
    ("interval", "decoded_tokens", "expected"), [(0, 1, 64), (None, 1, 64), (16, 1, 4), (16, 2, 2), (16, 9, 1)]
)
def test_windows_at_intervals_are_saved_before_the_engine_drops_a_block_of_one(
    interval: int | None, decoded_tokens: int, expected: int
) -> None:
    """A window of 17 tokens, in blocks of 4, is whole for 3 tokens more."""
    facts = two_groups(NUM_BLOCKS)
    full, window = facts.groups
    facts = replace(facts, groups=(full, replace(window, rule=replace(window.rule, window=17))))
    parts = put_together(facts=facts, retention_interval=interval, decoded_tokens=decoded_tokens)
    assert parts.saves.look_out.round_steps == expected


def test_all_parts_go_by_the_same_places() -> None:
    """Of the ranks, where they may copy: nothing is loaded or saved elsewhere, and a hit there waits for them."""
    engine = make_engine(DENSE)
    engine.serve("first", range(30))
    engine.forget()
    for may_copy in (False, True):
        engine.hear(WorkerReport(places={0: engine.places if may_copy else ()}))
        request = engine.arrive(f"again {may_copy}", range(30))
        assert engine.match(request) == (28 if may_copy else None)
        engine.admit(engine.arrive(f"new {may_copy}", range(100, 130)))
        assert bool(engine.step().saves) is may_copy


def test_an_engines_settings_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_compat, "wants_events", lambda config: True)
    monkeypatch.setattr(vllm_compat, "draft_tokens", lambda config: 3)
    engine: ScriptedEngine = make_engine(DENSE, extra={"save_policy": "on_evict", "verify": "always"})
    parts = engine.parts
    assert policy_of(parts) == "on_evict"
    assert parts.events is not None
    parts.events.close()
    assert parts.saves.look_out.decoded_tokens == 4
    assert parts.restores.settings.verify_always


@pytest.mark.parametrize(
    ("step_tokens", "under_way", "expected"), [(4, 1, 4), (8, 1, 8), (4, 2, 8), (8192, 1, 8)], ids=str
)
def test_so_many_blocks_may_be_pinned_as_fill_while_a_save_takes_within_bounds(
    step_tokens: int, under_way: int, expected: int
) -> None:
    """Of 32, at least four and at most eight."""
    settings = {"step_tokens": step_tokens, "max_requests": 0, "steps_under_way": under_way}
    assert put_together(**settings).pins.limit == expected


# ---- places of ranks ----


HERE, THERE, AGAIN = Place(1, 1), Place(2, 1), Place(1, 2)


def test_a_place_counts_when_every_rank_has_named_it() -> None:
    places = RankPlaces(2)
    places.note({0: [HERE, THERE]})
    assert not places.has_all(HERE)
    places.note({1: [HERE]})
    assert places.has_all(HERE)
    assert not places.has_all(THERE)
    places.note({1: [HERE, THERE]})
    assert places.has_all(THERE)


def test_each_rank_names_all_its_places_every_time() -> None:
    places = RankPlaces(2)
    places.note({0: [HERE], 1: [HERE]})
    places.note({1: [THERE]})
    assert not places.has_all(HERE)
    places.note({})
    assert not places.has_all(HERE)
    places.note({0: [THERE]})
    assert places.has_all(THERE)


def test_another_session_of_the_same_memory_is_another_place() -> None:
    places = RankPlaces(1)
    places.note({0: [HERE]})
    assert not places.has_all(AGAIN)


def test_pairs_are_places() -> None:
    """As they come from a client, and through a message."""
    places = RankPlaces(1)
    places.note({0: [(1, 1)]})  # type: ignore[list-item]
    assert places.has_all(HERE)


def test_a_rank_that_has_nowhere_to_copy_is_known_not_to() -> None:
    places = RankPlaces(2)
    places.note({0: [HERE]})
    assert not places.are_all_known
    places.note({1: []})
    assert not places.are_all_known
    places.note({1: [THERE]})
    assert places.are_all_known


# ---- several machines ----


def test_a_place_of_several_machines_counts_when_the_ranks_of_each_have_named_theirs() -> None:
    nodes = Nodes()
    places = RankPlaces(4, nodes=nodes.cache, node_ranks=2)
    here, there = nodes.cache.find_places(nodes.cache.memory_id)
    together = Place(nodes.cache.memory_id, nodes.cache.session)
    places.note({0: [here], 1: [here], 2: [there]})
    assert not places.have_all_nodes(together)
    places.note({3: [HERE]})
    assert not places.have_all_nodes(together)
    places.note({3: [HERE, there]})
    assert places.have_all_nodes(together)
    assert not places.have_all_nodes(Place(together.memory_id + 1, 0))


def test_an_engine_on_two_machines_goes_by_both() -> None:
    """Each machine keeps its part of a saved block, under names of its own. Without the other machine's server nothing
    is saved or found."""
    engine = make_engine(DENSE, ranks=2, nodes=2)
    engine.serve("first", range(30))
    take_step(engine)
    assert [len(cache.published) for cache in engine.caches] == [7, 7]
    engine.forget()
    request = engine.arrive("again", range(30))
    assert engine.match(request) is None
    assert engine.connector.has_pending_push_work()
    take_step(engine)
    assert engine.match(request) == 28
    admission = engine.admit(request)
    assert admission is not None
    (job,) = take_step(engine).loads
    assert job.moves.addresses.shape == (7, 2)
    assert [place.memory_id for place in job.places] == [cache.memory_id for cache in engine.caches]
    engine.report(StepPlan(loads=(job,)))
    engine.finish(request)
    take_step(engine)
    engine.assert_at_rest()
    engine.forget()
    engine.caches[1].is_served = False
    take_step(engine)
    assert engine.match(engine.arrive("without", range(30))) == 0


def take_step(engine: ScriptedEngine) -> StepPlan:
    """Takes a step, and the other node's answer with it."""
    plan = engine.step()
    (proxy,) = engine.proxies
    if 1 in plan.nodes:
        proxy.obey(plan.nodes[1])
    news = proxy.report(is_idle=True)
    engine.hear(WorkerReport(nodes={} if news is None else {1: news}))
    return plan


def test_a_former_memory_retires_once_when_no_job_uses_it_any_more() -> None:
    cache, saves, restores = (
        SimpleNamespace(memory_id=0),
        SimpleNamespace(memories={1}),
        SimpleNamespace(memories={2}),
    )
    memories: Any = FormerMemories(cache, saves, restores)  # type: ignore[arg-type]
    retired = []
    for cache.memory_id in (1, 2, 3):
        retired.append(memories.take_retired())
    saves.memories = set()
    retired.append(memories.take_retired())
    cache.memory_id, restores.memories = 2, set()  # the second server's memory is used again
    retired += [memories.take_retired(), memories.take_retired()]
    assert retired == [(), (), (), (1,), (3,), ()]

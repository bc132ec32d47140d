"""The servers of all nodes as one cache: what all have is found, and whatever happens to one of them is a miss."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.cache import AcquireOutcome, Ask
from kvoffload.client import HintSettings
from kvoffload.connector.common.step_plan import BlockMoves, LoadJob, Place, SaveJob, StepPlan
from kvoffload.connector.nodes import all_nodes
from kvoffload.connector.nodes.all_nodes import MAX_MEMORIES
from kvoffload.connector.nodes.other_node import ANSWER_WAIT_S
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import HintAction, Hinted
from tests.kit.connector.facts import group_facts
from tests.kit.connector.nodes import BLOCK, SLOTS, Nodes, make_chain, make_publication

each_size = pytest.mark.parametrize("size", [2, 3])
CHAIN = make_chain(1, 6)
WINDOWED = (group_facts(0), group_facts(1, ReuseRule.WINDOW, window=5))

# ---- loads ----


@each_size
def test_what_all_nodes_have_is_found_a_step_later_and_leased_on_each(size: int) -> None:
    nodes = Nodes(size)
    nodes.save(CHAIN)
    nodes.settle()
    pending = nodes.cache.start_acquire(Ask(CHAIN, alignment=BLOCK))
    assert nodes.cache.poll(pending) is None
    assert nodes.cache.is_asking
    nodes.step()
    found = nodes.cache.poll(pending)
    assert found is not None
    assert (found.outcome, found.boundary) == (AcquireOutcome.HIT, 24)
    assert nodes.leases == [1] * size
    (group,) = found.groups
    for node, client in enumerate(nodes.clients):
        own = client.current.acquire(Ask(CHAIN, alignment=BLOCK))
        assert group.addresses[:, node].tolist() == own.groups[0].addresses.tolist()
        assert own.lease is not None
        client.release(own.lease)
    assert found.lease is not None
    nodes.cache.release(found.lease)
    nodes.cache.release(found.lease)
    nodes.settle()
    assert nodes.leases == [0] * size


def test_digests_are_those_of_all_shards_in_their_order() -> None:
    nodes = Nodes()
    nodes.save(CHAIN)
    nodes.settle()
    found = nodes.ask(CHAIN, shards=4)
    assert found.groups[0].digests.reshape(-1).tolist() == list(range(1, 25))


def test_a_question_has_only_what_it_is_about() -> None:
    nodes = Nodes()
    nodes.save(CHAIN[:64])
    nodes.settle()
    nodes.cache.start_acquire(Ask(CHAIN, alignment=BLOCK))
    (question,) = nodes.cache.complete(StepPlan()).nodes[1].questions
    assert (question.ask.chain, question.ask.limit) == (CHAIN[:64], 8)


def test_what_this_node_does_not_have_costs_the_others_nothing() -> None:
    nodes = Nodes()
    nodes.save_on(1, CHAIN)
    pending = nodes.cache.start_acquire(Ask(CHAIN, alignment=BLOCK))
    assert nodes.cache.poll(pending) is pending.found is not None
    assert not pending.found.is_hit
    assert not nodes.cache.is_asking


@pytest.mark.parametrize("which", [0, 1])
def test_what_one_node_has_less_of_is_found_so_far(which: int) -> None:
    nodes = Nodes(3)
    for node in range(3):
        nodes.save_on(node, CHAIN, blocks=range(2 if node == which else 6))
    found = nodes.ask(CHAIN)
    assert (found.boundary, [len(group.addresses) for group in found.groups]) == (8, [2])
    assert nodes.leases == [1, 1, 1]
    assert found.lease is not None
    nodes.cache.release(found.lease)
    nodes.settle()
    assert nodes.leases == [0, 0, 0]


def test_windows_are_those_of_the_boundary_that_all_have() -> None:
    nodes = Nodes(groups=WINDOWED)
    for node, blocks in ((0, 6), (1, 3)):
        for group in (0, 1):
            nodes.save_on(node, CHAIN, group=group, blocks=range(blocks))
    found = nodes.ask(CHAIN)
    assert found.boundary == 12
    assert [(group.first, len(group.addresses)) for group in found.groups] == [(0, 3), (2, 1)]


def test_what_another_node_lacks_is_saved_again_on_all() -> None:
    nodes = Nodes()
    nodes.save_on(0, CHAIN)
    nodes.save_on(1, CHAIN, blocks=range(2))
    assert nodes.cache.lookup(0, CHAIN).all()
    found = nodes.ask(CHAIN)
    assert nodes.cache.lookup(0, CHAIN).tolist() == [True, True, False, False, False, False]
    assert found.lease is not None
    nodes.cache.release(found.lease)
    nodes.save(CHAIN, blocks=range(2, 6))
    nodes.settle()
    assert nodes.cache.lookup(0, CHAIN).all()
    assert nodes.ask(CHAIN).boundary == 24
    assert [client.stats().readable for client in nodes.clients] == [6, 6]


def test_of_what_is_lacking_a_bounded_number_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_nodes, "MAX_LACKING", 6)
    nodes = Nodes()
    chains = [make_chain(seed, 6) for seed in (1, 2)]
    for chain in chains:
        nodes.save_on(0, chain)
        assert not nodes.ask(chain).is_hit
    assert [nodes.cache.lookup(0, chain).any() for chain in chains] == [True, False]


def test_what_another_node_has_nothing_of_is_a_miss_everywhere() -> None:
    nodes = Nodes()
    nodes.save_on(0, CHAIN)
    assert not nodes.ask(CHAIN).is_hit
    nodes.settle()
    assert nodes.leases == [0, 0]
    assert not nodes.cache.lookup(0, CHAIN).any()


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_question_that_nobody_wants_any_more_leaves_nothing(steps: int) -> None:
    nodes = Nodes()
    nodes.save(CHAIN)
    nodes.settle()
    pending = nodes.cache.start_acquire(Ask(CHAIN, alignment=BLOCK))
    for _ in range(steps):
        nodes.step()
        nodes.cache.poll(pending)
    nodes.cache.cancel(pending)
    assert pending.found is not None
    assert not pending.found.is_hit
    nodes.settle()
    assert nodes.leases == [0, 0]


def test_an_answer_that_comes_after_its_end_leaves_nothing() -> None:
    nodes = Nodes()
    nodes.save(CHAIN)
    nodes.settle()
    pending = nodes.cache.start_acquire(Ask(CHAIN, alignment=BLOCK))
    _, reports = nodes.tell()
    nodes.cache.cancel(pending)
    nodes.cache.hear(reports)
    nodes.settle()
    assert nodes.leases == [0, 0]


def test_a_node_that_never_answers_is_a_miss_in_the_end() -> None:
    nodes = Nodes()
    nodes.save(CHAIN)
    nodes.settle()
    pending = nodes.cache.start_acquire(Ask(CHAIN, alignment=BLOCK))
    nodes.tell()
    assert nodes.cache.wait_for(pending) is None
    nodes.now_s += ANSWER_WAIT_S
    found = nodes.cache.poll(pending)
    assert found is not None
    assert not found.is_hit
    nodes.settle()
    assert nodes.leases == [0, 0]


def test_without_the_server_of_any_node_all_is_a_miss_and_nothing_is_saved() -> None:
    nodes = Nodes()
    nodes.save(CHAIN)
    nodes.settle()
    nodes.clients[1].is_served = False
    nodes.step()
    assert not nodes.cache.is_served
    assert not nodes.ask(CHAIN).is_hit
    assert not nodes.cache.is_asking
    nodes.clients[1].is_served = True
    nodes.step()
    assert nodes.ask(CHAIN).boundary == 24


def test_what_is_refused_on_one_node_is_refused() -> None:
    nodes = Nodes()
    nodes.save(CHAIN)
    nodes.settle()
    nodes.clients[1].refusal = AcquireOutcome.NO_ROOM
    assert nodes.ask(CHAIN).outcome is AcquireOutcome.NO_ROOM
    nodes.settle()
    assert nodes.leases == [0, 0]


def test_damaged_records_are_forgotten_on_all_nodes() -> None:
    nodes = Nodes()
    nodes.save(CHAIN)
    nodes.settle()
    nodes.cache.invalidate(0, CHAIN)
    nodes.settle()
    assert [client.stats().readable for client in nodes.clients] == [0, 0]


# ---- saves ----


@each_size
def test_slots_are_those_that_every_node_has(size: int) -> None:
    nodes = Nodes(size)
    assert nodes.cache.ready_slots() == [SLOTS]
    assert nodes.cache.most_slots(0) == SLOTS
    slots = nodes.cache.take(0, SLOTS + 1)
    assert slots.addresses.shape == slots.tickets.shape == (SLOTS, size)
    assert nodes.cache.ready_slots() == [0]
    assert len(nodes.cache.take(0, 1)) == 0
    nodes.step()
    assert nodes.cache.ready_slots() == [SLOTS]


def test_slots_are_asked_for_again_until_there_are_some() -> None:
    nodes = Nodes()
    nodes.clients[1].slots_left = 0
    nodes.cache.take(0, SLOTS)
    nodes.settle()
    assert nodes.cache.ready_slots() == [0]
    nodes.clients[1].slots_left = None
    nodes.now_s += 1
    nodes.step()
    assert nodes.cache.ready_slots() == [SLOTS]


def test_each_node_publishes_its_own_shards() -> None:
    nodes = Nodes()
    nodes.save(CHAIN[:64])
    nodes.settle()
    for client, digests in zip(nodes.clients, ([1, 2, 3, 4], [5, 6, 7, 8]), strict=True):
        assert [one.digest for one in client.published] == digests
        assert [one.shard for one in client.published] == [0, 0, 1, 1]
    assert nodes.clients[0].register.fingerprint != nodes.clients[1].register.fingerprint


@pytest.mark.parametrize("which", [0, 1])
def test_records_whose_memory_is_another_by_now_are_published_nowhere(which: int) -> None:
    nodes = Nodes()
    publication = make_publication(nodes.cache, CHAIN)
    nodes.clients[which].serve_anew()
    nodes.step()
    assert not nodes.cache.publish(publication)
    nodes.settle()
    assert [client.stats().readable for client in nodes.clients] == [0, 0]
    assert len(nodes.clients[1 - which].aborted[-1]) == 6


def test_what_failed_is_given_back_on_all_nodes() -> None:
    nodes = Nodes()
    before = [client.stats().reserved for client in nodes.clients]
    nodes.cache.abort(nodes.cache.take(0, 4))
    nodes.settle()
    assert [len(client.aborted[0]) for client in nodes.clients] == [4, 4]
    assert nodes.clients[1].stats().reserved == before[1] - 4


def test_there_is_room_where_all_have_some() -> None:
    nodes = Nodes()
    assert nodes.cache.has_room
    nodes.clients[1].is_full = True
    nodes.step()
    assert not nodes.cache.has_room


# ---- memories ----


def test_a_job_says_where_it_lies_on_each_node() -> None:
    nodes = Nodes()
    memory_id = nodes.cache.memory_id
    moves = BlockMoves(np.array([0]), np.array([3]), np.array([[64, 128]], np.uint64))
    plan = nodes.step(
        StepPlan(
            loads=(LoadJob("a", Place(memory_id, 0), moves),), saves=(SaveJob(1, Place(memory_id, 0), moves),), step=5
        )
    )
    places = tuple(Place(client.memory_id, client.session) for client in nodes.clients)
    assert (plan.loads[0].places, plan.saves[0].places, plan.step) == (places, places, 5)
    assert nodes.cache.find_places(memory_id) == places
    assert nodes.cache.memory(memory_id) is nodes.clients[0].memory(places[0].memory_id)
    with pytest.raises(ValueError, match="not mapped here"):
        nodes.cache.memory(memory_id + 1000)


def test_a_former_memory_is_retired_on_its_node_alone() -> None:
    nodes = Nodes()
    former, gone = nodes.cache.memory_id, nodes.clients[1].memory_id
    nodes.clients[1].serve_anew()
    nodes.step()
    assert nodes.cache.memory_id != former
    plan = nodes.step(StepPlan(retired=(former,)))
    assert {node: orders.retired for node, orders in plan.nodes.items() if orders.retired} == {1: (gone,)}
    assert plan.retired == ()
    assert nodes.cache.find_places(former) == ()


def test_without_a_memory_on_some_node_there_is_none() -> None:
    nodes = Nodes()
    assert nodes.cache.session == 0
    nodes.others[0].state = type(nodes.others[0].state)()
    assert nodes.cache.memory_id == 0
    assert len(nodes.cache.take(0, 1)) == 0


def test_memories_that_were_are_forgotten_beyond_a_bound() -> None:
    nodes = Nodes()
    first = nodes.cache.memory_id
    for session in range(2, MAX_MEMORIES + 3):
        nodes.others[0].state = type(nodes.others[0].state)(memory_id=1, session=session)
        assert nodes.cache.memory_id > first
    assert nodes.cache.find_places(first) == ()


def test_a_step_that_has_nothing_for_a_node_is_sent_as_it_is() -> None:
    nodes = Nodes()
    plan = StepPlan(has_forward=True)
    assert nodes.cache.complete(plan) is plan


def test_the_end_closes_this_nodes_client() -> None:
    nodes = Nodes()
    nodes.cache.begin_step()
    assert nodes.clients[0].steps > 0
    assert nodes.cache.warnings == 0
    nodes.cache.close()
    assert [client.is_closed for client in nodes.clients] == [True, False]


def test_a_hint_is_for_all_nodes_and_this_ones_answer_counts() -> None:
    nodes = Nodes(3)
    heard: list[Hinted | None] = []
    hint = HintSettings(action=HintAction.RETAIN, chain=CHAIN, limit=24, ttl_s=5)
    nodes.cache.start_hint(hint, on_answer=heard.append)
    assert heard == [nodes.clients[0].hinted]
    assert nodes.cache.is_asking
    nodes.step()
    assert [client.hints for client in nodes.clients] == [[hint]] * 3
    assert not nodes.cache.is_asking

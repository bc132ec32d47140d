"""The servers of all nodes of an engine as one cache: a block is there when every node has its part of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import (
    AcquiredBlocks,
    AcquireOutcome,
    Ask,
    BlockLease,
    LeasedGroup,
    Publication,
    ReservedSlots,
    SegmentMap,
)
from kvoffload.client import HintSettings, PendingAcquire, PromptNote, TierWait
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.orders import NodeOrders, NodeQuestion, NodeReport
from kvoffload.connector.common.step_plan import LoadJob, Place, SaveJob, StepPlan
from kvoffload.connector.nodes.other_node import ANSWER_WAIT_S, OtherNode
from kvoffload.protocol import Hinted
from kvoffload.types import HASH_BYTES

MAX_ROUNDS = 4
"""How often nodes that have different parts of a prompt are asked again for the part that all have; then it is a
miss."""
MAX_MEMORIES = 64
"""Maximum number of remembered combinations of the nodes' memories; beyond it the oldest is forgotten."""
MAX_LACKING = 1 << 16
"""Maximum number of blocks noted as missing on some node. Beyond it all are forgotten, and noted again when missed."""
_WORDS = HASH_BYTES // 8
_Job = TypeVar("_Job", LoadJob, SaveJob)


@dataclass(eq=False)
class _Acquire(PendingAcquire):
    """A question to all nodes. `numbers` and `parts` are those of the other nodes, by position."""

    ask: Ask = field(default_factory=lambda: Ask(b""))
    far: TierWait | None = None
    own: PendingAcquire = field(default_factory=lambda: PendingAcquire(0))
    numbers: dict[int, int] = field(default_factory=dict)
    parts: dict[int, AcquiredBlocks] = field(default_factory=dict)
    rounds: int = 0
    end_s: float = 0.0
    is_late: bool = False

    @property
    def came_late(self) -> bool:
        return self.is_late or self.own.came_late


@dataclass(frozen=True)
class _Lease:
    own: BlockLease
    numbers: Mapping[int, int]


class AllNodes:
    """Owned by the scheduler's thread. Its `memory_id` is a number for a combination of the nodes' memories. Addresses
    and tickets have a column for each node, of which a rank takes its own.

    A node whose server does not answer makes every question a miss. Blocks on one node alone are never found, and are
    evicted like all unused ones; blocks that another node was found to lack are saved again on all.
    """

    def __init__(
        self,
        own: CacheClient,
        others: Sequence[OtherNode],
        *,
        hash_block_size: int,
        node_shards: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes the client of this node's server (the first node's), and the other nodes in their order."""
        self._own = own
        self._others = tuple(others)
        self._hash_block_size = hash_block_size
        self._node_shards = node_shards
        self._clock = clock
        self._numbers = count(1)
        self._memories: dict[int, tuple[Place, ...]] = {}
        self._number_of: dict[tuple[Place, ...], int] = {}
        self._asked: dict[int, tuple[_Acquire, int]] = {}
        """Questions without an answer yet, by number, with the node's position."""
        self._open: dict[int, _Acquire] = {}
        """Questions that are not settled, by `id`."""
        self._leases: dict[int, _Lease] = {}
        self._lacking: set[int] = set()
        """The first words of the names of blocks that some node lacks."""

    # ---- what goes with the engine's steps ----

    @property
    def is_asking(self) -> bool:
        """Whether orders wait for a node, or a node owes an answer, so that the engine must take another step."""
        return bool(self._open) or any(other.is_asking for other in self._others)

    def hear(self, reports: Mapping[int, NodeReport]) -> None:
        """Takes what nodes have reported, by number: the first of the others is 1."""
        for node, report in reports.items():
            if not 1 <= node <= len(self._others):
                continue
            for answer in self._others[node - 1].hear(report):
                asked, _ = self._asked.pop(answer.number, (None, 0))
                if asked is not None:
                    asked.parts[node - 1] = answer.found
                    asked.is_late |= answer.came_late

    def complete(self, plan: StepPlan) -> StepPlan:
        """Returns the plan with each node's orders, and with the places of its jobs on each node."""
        for asked in list(self._open.values()):
            self._go_on(asked)
        retired = self._retire(plan.retired) if plan.retired else {}
        orders = {}
        for node, other in enumerate(self._others, 1):
            other.refill()
            of_node = other.take_orders(retired.get(node, ()))
            if not of_node.is_empty:
                orders[node] = of_node
        if 0 in retired:
            orders[0] = NodeOrders(retired[0])
        if not (orders or plan.loads or plan.saves or plan.retired):
            return plan
        return replace(
            plan,
            loads=tuple(self._place(job) for job in plan.loads),
            saves=tuple(self._place(job) for job in plan.saves),
            retired=(),
            nodes=orders,
        )

    @property
    def own(self) -> CacheClient:
        """The client of the server on the scheduler side's node."""
        return self._own

    @property
    def others(self) -> tuple[OtherNode, ...]:
        """All nodes but the scheduler side's, in their order."""
        return self._others

    def find_places(self, memory_id: int) -> tuple[Place, ...]:
        """Returns the place on each node that belongs to this memory; empty: it is not remembered (any more)."""
        return self._memories.get(memory_id, ())

    # ---- loads ----

    @property
    def memory_id(self) -> int:
        places = (
            Place(self._own.memory_id, self._own.session),
            *(Place(other.state.memory_id, other.state.session) for other in self._others),
        )
        return self._find_number(places) if all(place.memory_id for place in places) else 0

    @property
    def session(self) -> int:
        return 0

    @property
    def is_served(self) -> bool:
        return self._own.is_served and all(other.state.is_served for other in self._others)

    @property
    def fault(self) -> str:
        """Why this machine's server or another's does not serve the engine, in one line; empty: all do."""
        return self._own.fault or ("" if self.is_served else "the server of another machine of this engine")

    @property
    def warnings(self) -> int:
        return self._own.warnings

    @property
    def has_tiers(self) -> bool:
        return self._own.has_tiers or any(other.state.has_tiers for other in self._others)

    def memory(self, memory_id: int) -> SegmentMap:
        places = self._memories.get(memory_id)
        if places is None:
            raise ValueError(f"memory {memory_id} is not mapped here")
        return self._own.memory(places[0].memory_id)

    def begin_step(self) -> None:
        self._own.begin_step()

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        """Looks blocks up on this node alone. Blocks that another node was found to lack count as missing."""
        found = self._own.lookup(group, hashes)
        if self._lacking and found.any():
            found = found & np.array([word not in self._lacking for word in _list_words(hashes)], np.bool_)
        return found

    def find_boundary(self, ask: Ask) -> int:
        return self._own.find_boundary(ask)

    def start_acquire(self, ask: Ask, *, far: TierWait | None = None, wait_s: float = 0.0) -> PendingAcquire:
        """Asks this node first. The others are asked once it has a lease, for as many tokens as it has: a miss here
        costs them nothing."""
        asked = _Acquire(local=ask.local, ask=ask._replace(chain=bytes(ask.chain)), far=far)
        if not self.is_served:
            asked.found = AcquiredBlocks(AcquireOutcome.MISS, ask.local)
            return asked
        asked.own = self._own.start_acquire(self._narrow(ask), far=far, wait_s=wait_s)
        asked.in_memory, asked.request, asked.promotion = asked.own.in_memory, asked.own.request, asked.own.promotion
        asked.end_s = self._clock() + max(ANSWER_WAIT_S, wait_s) + (far.wait_s if far is not None else 0.0)
        self._open[id(asked)] = asked
        self._go_on(asked)
        return asked

    def poll(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        assert isinstance(pending, _Acquire)
        self._go_on(pending)
        return pending.found

    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        """Waits for this node's answer alone; the others' answers come with a step."""
        assert isinstance(pending, _Acquire)
        if pending.found is None and pending.own.found is None:
            self._own.wait_for(pending.own)
            self._go_on(pending)
        return pending.found

    def cancel(self, pending: PendingAcquire) -> None:
        assert isinstance(pending, _Acquire)
        if pending.found is None:
            self._end(pending, AcquireOutcome.MISS)
        elif pending.found.lease is not None:
            self.release(pending.found.lease)
            pending.found = AcquiredBlocks(AcquireOutcome.MISS, pending.local)

    def prefetch(self, ask: Ask) -> None:
        """Prefetches on this node alone; the other nodes ask their slower tiers when an acquire reaches them."""
        self._own.prefetch(ask)

    def release(self, lease: BlockLease) -> None:
        held = self._leases.pop(lease.number, None)
        if held is not None:
            self._own.release(held.own)
            for at, number in held.numbers.items():
                self._others[at].end(number)

    # ---- saves ----

    @property
    def has_room(self) -> bool:
        return self._own.has_room and all(other.state.has_room for other in self._others)

    def ready_slots(self) -> list[int]:
        ready = self._own.ready_slots()
        return [min(have, *(other.count_ready(at) for other in self._others)) for at, have in enumerate(ready)]

    def most_slots(self, group: int) -> int:
        most = [other.state.most_slots[group] for other in self._others if group < len(other.state.most_slots)]
        return min(self._own.most_slots(group), *most) if len(most) == len(self._others) else 0

    def take(self, group: int, count: int) -> ReservedSlots:
        """Takes as many slots as every node has ready, up to `count`."""
        memory_id = self.memory_id
        most = min(count, *(other.count_ready(group) for other in self._others)) if memory_id else 0
        own = self._own.take(group, most)
        parts = [own, *(other.take(group, len(own)) for other in self._others)]
        tickets = np.stack([part.tickets for part in parts], axis=1)
        addresses = np.stack([part.addresses for part in parts], axis=1)
        return ReservedSlots(memory_id, 0, group, tickets, addresses)

    def publish(self, publication: Publication) -> bool:
        """Publishes on all nodes, or on none, if a node has another server by now, which lost these records."""
        slots, digests = publication.slots, publication.digests
        if slots.memory_id != self.memory_id or digests is None:
            self.abort(slots)
            return False
        of_shards = digests.reshape(publication.shards, len(slots))
        per_node = publication.shards // (1 + len(self._others))
        for node, part in enumerate(self._divide(slots)):
            rows = of_shards[node * per_node : (node + 1) * per_node]
            mine = publication._replace(slots=part, digests=rows.reshape(-1), shards=per_node)
            if node == 0:
                self._own.publish(mine)
            else:
                parents = None if mine.parents is None else bytes(mine.parents)
                self._others[node - 1].publish(mine._replace(hashes=bytes(mine.hashes), parents=parents))
        if self._lacking:
            self._lacking.difference_update(_list_words(publication.hashes))
        return True

    def abort(self, slots: ReservedSlots) -> None:
        for node, part in enumerate(self._divide(slots)):
            if node == 0:
                self._own.abort(part)
            elif len(part):
                self._others[node - 1].abort(part)

    def invalidate(self, group: int, hashes: Buffer) -> None:
        self._own.invalidate(group, hashes)
        for other in self._others:
            other.invalidate(group, bytes(hashes))

    def start_hint(self, hint: HintSettings, *, on_answer: Callable[[Hinted | None], None] | None = None) -> object:
        """Sends the hint to all nodes. Only this node's answer is reported."""
        for other in self._others:
            other.hint(hint)
        return self._own.start_hint(hint, on_answer=on_answer)

    def note_prompt(self, note: PromptNote) -> None:
        self._own.note_prompt(note)

    def take_inventory(self) -> bool:
        return self._own.take_inventory()

    def close(self) -> None:
        """Closes this node's client; the other nodes' clients end with their processes."""
        self._own.close()

    # ---- inside ----

    def _go_on(self, asked: _Acquire) -> None:
        """Takes a question as far as possible now: asks the other nodes, or settles it."""
        while asked.found is None:
            own = asked.own.found or self._own.poll(asked.own)
            if own is None:
                return
            parts = asked.parts.values()
            outcome = next((part.outcome for part in (own, *parts) if not part.is_hit), None)
            if outcome is not None:
                self._note_lacking(asked, own)
                self._end(asked, outcome)
                return
            boundary = min(own.boundary, *(part.boundary for part in parts)) if parts else own.boundary
            self._note_lacking(asked, own)
            if not self._ask_others(asked, boundary):
                if self._clock() >= asked.end_s:
                    self._end(asked, AcquireOutcome.MISS)
                return
            if own.boundary == boundary:
                self._found(asked, own)
                return
            asked.rounds += 1
            if asked.rounds > MAX_ROUNDS:
                self._end(asked, AcquireOutcome.MISS)
                return
            self._own.cancel(asked.own)
            asked.own = self._own.start_acquire(self._narrow(asked.ask._replace(limit=boundary)))

    def _ask_others(self, asked: _Acquire, boundary: int) -> bool:
        """Asks nodes that were not asked yet, or have leased more. Returns whether all have answered."""
        for at, other in enumerate(self._others):
            part = asked.parts.get(at)
            if part is not None and part.boundary > boundary:
                asked.rounds += 1
                other.end(asked.numbers.pop(at))
                del asked.parts[at]
            if at not in asked.numbers and asked.rounds <= MAX_ROUNDS:
                number = asked.numbers[at] = next(self._numbers)
                self._asked[number] = asked, at
                # Cut to the part that matters, because the question goes to every rank of the engine.
                chain = bytes(asked.ask.chain)[: boundary // self._hash_block_size * HASH_BYTES]
                ask = asked.ask._replace(chain=chain, limit=boundary)
                other.ask(NodeQuestion(number, self._narrow(ask), asked.far))
        return len(asked.parts) == len(self._others)

    def _found(self, asked: _Acquire, own: AcquiredBlocks) -> None:
        """Settles a question as a hit, if every node has leased the same blocks."""
        parts = [own, *(asked.parts[at] for at in range(len(self._others)))]
        alike = {tuple((group.first, len(group.addresses)) for group in part.groups) for part in parts}
        leases = [part.lease for part in parts]
        if len(alike) != 1 or own.lease is None or None in leases:
            self._end(asked, AcquireOutcome.MISS)
            return
        groups = tuple(
            LeasedGroup(
                of_nodes[0].first,
                np.stack([one.addresses for one in of_nodes], axis=1),
                np.concatenate([one.digests for one in of_nodes]),
            )
            for of_nodes in zip(*(part.groups for part in parts), strict=True)
        )
        memory_id = self._find_number(tuple(Place(one.memory_id, one.session) for one in leases if one is not None))
        lease = BlockLease(memory_id, next(self._numbers), 0)
        self._leases[lease.number] = _Lease(own.lease, dict(asked.numbers))
        del self._open[id(asked)]
        asked.found = AcquiredBlocks(AcquireOutcome.HIT, own.boundary, lease, groups)

    def _end(self, asked: _Acquire, outcome: AcquireOutcome) -> None:
        """Settles a question as no hit: the leases of all nodes are given back."""
        self._own.cancel(asked.own)
        for at, number in asked.numbers.items():
            self._asked.pop(number, None)
            self._others[at].end(number)
        asked.numbers.clear()
        self._open.pop(id(asked), None)
        asked.found = AcquiredBlocks(outcome, asked.local)

    def _note_lacking(self, asked: _Acquire, own: AcquiredBlocks) -> None:
        """Notes the blocks that this node has and another one lacks, so that they are saved again."""
        boundary = min((part.boundary for part in asked.parts.values()), default=own.boundary)
        if boundary < own.boundary:
            if len(self._lacking) >= MAX_LACKING:
                self._lacking.clear()
            size = self._hash_block_size
            words = _list_words(asked.ask.chain)
            self._lacking.update(words[boundary // size : own.boundary // size])

    def _narrow(self, ask: Ask) -> Ask:
        """Returns the question for one node, which knows only its own shards and numbers them from 0."""
        return ask._replace(shards=range(self._node_shards)) if ask.shards else ask

    def _find_number(self, places: tuple[Place, ...]) -> int:
        number = self._number_of.get(places)
        if number is None:
            number = self._number_of[places] = next(self._numbers)
            self._memories[number] = places
            if len(self._memories) > MAX_MEMORIES:
                oldest = next(iter(self._memories))
                del self._number_of[self._memories.pop(oldest)]
        return number

    def _retire(self, memories: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Forgets these combinations. Returns, by node, memories that are part of no remaining combination."""
        gone = []
        for number in memories:
            places = self._memories.pop(number, None)
            if places is not None:
                del self._number_of[places]
                gone.append(places)
        retired: dict[int, tuple[int, ...]] = {}
        for node in range(1 + len(self._others)):
            used = {places[node].memory_id for places in self._memories.values()}
            mine = tuple(dict.fromkeys(one[node].memory_id for one in gone if one[node].memory_id not in used))
            if mine:
                retired[node] = mine
        return retired

    def _divide(self, slots: ReservedSlots) -> list[ReservedSlots]:
        return [
            ReservedSlots(place.memory_id, place.session, slots.group, slots.tickets[:, at], slots.addresses[:, at])
            for at, place in enumerate(self._memories.get(slots.memory_id, ()))
        ]

    def _place(self, job: _Job) -> _Job:
        return replace(job, places=self.find_places(job.place.memory_id))


def _list_words(names: Buffer) -> list[int]:
    """Returns the first 64-bit words of names."""
    words: list[int] = np.frombuffer(memoryview(names), np.uint64)[::_WORDS].tolist()
    return words

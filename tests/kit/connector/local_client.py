"""A cache client without a server: a real cache in this process, with real memory, leases and digests.

What a server's answers depend on is up to the test: when they come, whether there are slots, whether it serves at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import (
    AcquiredBlocks,
    AcquireOutcome,
    Ask,
    BlockLease,
    CacheGeometry,
    CacheSettings,
    CacheStats,
    HugePages,
    LocalCache,
    LocalSession,
    Placed,
    Publication,
    ReservedSlots,
    SegmentMap,
)
from kvoffload.client import HintSettings, PendingAcquire, PromptNote, TierWait
from kvoffload.client.lanes import Pending
from kvoffload.connector.common.step_plan import Place
from kvoffload.protocol import Acquire, Acquired, Hinted, HintOutcome, Register
from kvoffload.types import HASH_BYTES

MEMORY = CacheSettings(
    memory_bytes=4 << 20,
    segment_bytes=2 << 20,
    extent_bytes=16 << 10,
    entry_limit=1 << 14,
    huge_pages=HugePages.NONE,
    threads=1,
)

MANY_SLOTS = 1 << 20
STOCK = 16


@dataclass(frozen=True, kw_only=True)
class Published:
    """One record of one shard, as the cache was told of it."""

    group: int
    name: bytes
    parent: bytes
    shard: int
    digest: int
    memory_id: int
    address: int
    """Of the record, not of the slot."""
    tenant: str


class LocalClient:
    """A client as the connector's scheduler side uses it; its workers have `LocalPlaces`. For one thread."""

    def __init__(self, register: Register, memory: CacheSettings = MEMORY) -> None:
        self.register = register
        self._geometry = CacheGeometry.read(register)
        self.sessions: dict[int, LocalSession] = {}
        self._held: list[Callable[[bool], None]] = []
        self.is_served = True
        self.fault = ""
        self.warnings = 0
        self.holds_answers = False
        """Whether answers are held back until `answer`, or until a caller waits if `answers_when_waited`."""
        self.answers_when_waited = False
        self.refusal: AcquireOutcome | None = None
        """How every acquire is answered."""
        self.slots_left: int | None = None
        """How many `take` still gives; None: as many as there is room for."""
        self.steps = 0
        self.asked: list[tuple[int, int]] = []
        self.far: list[TierWait | None] = []
        self.wait_s = 0.0
        """Seconds that the last acquire would have waited for a late answer."""
        self.is_full = False
        """Whether `take` gives no slot without displacing a block, even if there is room."""
        self.has_tiers = False
        """(local, limit) of everything that a server would have heard."""
        self.prefetched: list[tuple[int, int]] = []
        self.published: list[Published] = []
        self.aborted: list[ReservedSlots] = []
        self.notes: list[PromptNote] = []
        self.hints: list[HintSettings] = []
        self.hinted: Hinted | None = Hinted(outcome=HintOutcome.DONE)
        """How every hint is answered."""
        self.is_closed = False
        self.serve_anew(memory)

    # ---- what a test does ----

    def serve_anew(self, memory: CacheSettings = MEMORY) -> int:
        """Another server is there, with other memory: its number. Leases and slots in the former memory stay."""
        self.local_cache = LocalCache.create(memory)
        session = LocalSession(self.local_cache, self.register.fingerprint, self._geometry)
        self.sessions[session.memory_id] = session
        self.current = session
        return session.memory_id

    def answer(self, *, is_lost: bool = False) -> None:
        """Lets what was held back come now, or never."""
        held, self._held = self._held, []
        for answer in held:
            answer(is_lost)

    def stats(self) -> CacheStats:
        return self.current.stats()

    def record(self, one: Published) -> npt.NDArray[np.uint8]:
        """Its bytes, to be looked at and damaged."""
        size_bytes = self._geometry.groups[one.group].record_bytes
        return self.memory(one.memory_id).view(one.address, size_bytes)

    def find_readable(self) -> list[Published]:
        """Records of blocks that are there now, where they were written."""
        return [one for one in self.published if self.lookup(one.group, one.name).all()]

    # ---- what the connector does ----

    @property
    def memory_id(self) -> int:
        return self.current.memory_id

    @property
    def session(self) -> int:
        return int(self.current.session)

    def places(self) -> tuple[tuple[int, int], ...]:
        return tuple(Place(memory_id, int(session.session)) for memory_id, session in list(self.sessions.items()))

    def may_copy(self, held: Placed) -> bool:
        return (held.memory_id, held.session) in self.places()

    def memory(self, memory_id: int) -> SegmentMap:
        if memory_id not in self.sessions:
            raise ValueError(f"memory {memory_id} is not mapped here")
        return self.sessions[memory_id].memory(memory_id)

    def ready_bytes(self, memory_id: int) -> int:
        return self.memory(memory_id).size_bytes

    def begin_step(self) -> None:
        self.steps += 1

    def lookup(self, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        return self.current.lookup(group, hashes)

    def find_boundary(self, ask: Ask) -> int:
        return self.current.find_boundary(ask)

    def start_acquire(self, ask: Ask, *, far: TierWait | None = None, wait_s: float = 0.0) -> PendingAcquire:
        """As `Client` does, only what is there is asked for."""
        self.far.append(far)
        self.wait_s = wait_s
        local = ask.local
        pending = PendingAcquire(local=local)
        boundary = self.find_boundary(ask)
        if not self.is_served or boundary == local:
            pending.found = AcquiredBlocks(AcquireOutcome.MISS, local)
            return pending
        message = Acquire(name_space=0, chain=bytes(ask.chain), local=local, limit=boundary, alignment=ask.alignment)
        pending.request = request = Pending(message=message, deadline_ns=0, sent_ns=0)
        session = self.current
        self.asked.append((local, boundary))

        def answer(is_lost: bool) -> None:
            if is_lost or self.refusal is not None:
                found = AcquiredBlocks(self.refusal or AcquireOutcome.MISS, local)
            else:
                found = session.acquire(ask._replace(limit=boundary))
            request.end(None if is_lost else Acquired(outcome=found.outcome))
            if request.is_wanted:
                pending.found = found
            elif found.lease is not None:
                self.release(found.lease)

        if self.holds_answers:
            self._held.append(answer)
        else:
            answer(False)
        return pending

    def poll(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        return pending.found

    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        if self.answers_when_waited:
            self.answer()
        return pending.found

    def prefetch(self, ask: Ask) -> None:
        self.prefetched.append((ask.local, ask.limit))

    def cancel(self, pending: PendingAcquire) -> None:
        if pending.request is not None:
            pending.request.is_wanted = False
        if pending.found is not None and pending.found.lease is not None:
            self.release(pending.found.lease)
        pending.found = AcquiredBlocks(AcquireOutcome.MISS, pending.local)

    def release(self, lease: BlockLease) -> None:
        self.sessions[lease.memory_id].release(lease)

    @property
    def has_room(self) -> bool:
        stats = self.stats()
        return not self.is_full and 32 * (stats.capacity_bytes - stats.used_bytes) > stats.capacity_bytes

    def ready_slots(self) -> list[int]:
        return [MANY_SLOTS if self.slots_left is None else self.slots_left] * len(self._geometry.groups)

    def most_slots(self, group: int) -> int:
        return MANY_SLOTS

    def take(self, group: int, count: int) -> ReservedSlots:
        if self.slots_left is not None:
            count = min(count, self.slots_left)
        slots = self.current.reserve(group, count=count if self.is_served else 0)
        if self.slots_left is not None:
            self.slots_left -= len(slots)
        return slots

    def publish(self, publication: Publication) -> bool:
        slots, parents, digests = publication.slots, publication.parents, publication.digests
        assert parents is not None
        assert digests is not None
        if slots.memory_id != self.memory_id:
            return False
        names, before = bytes(publication.hashes), bytes(parents)
        assert len(names) == len(before) == HASH_BYTES * len(slots)
        size_bytes = self._geometry.groups[slots.group].record_bytes
        for number, of_shard in enumerate(digests.reshape(publication.shards, len(slots)), publication.shard):
            for at, address in enumerate(slots.addresses.tolist()):
                part = slice(at * HASH_BYTES, (at + 1) * HASH_BYTES)
                self.published.append(
                    Published(
                        group=slots.group,
                        name=names[part],
                        parent=before[part],
                        shard=number,
                        digest=int(of_shard[at]),
                        memory_id=slots.memory_id,
                        address=address + number * size_bytes,
                        tenant=publication.tenant,
                    )
                )
        return self.current.publish(publication)

    def abort(self, slots: ReservedSlots) -> None:
        self.aborted.append(slots)
        self.sessions[slots.memory_id].abort(slots)

    def invalidate(self, group: int, hashes: Buffer) -> None:
        self.current.invalidate(group, hashes)

    def start_hint(self, hint: HintSettings, *, on_answer: Callable[[Hinted | None], None] | None = None) -> None:
        """Notes the hint for the test, and answers it with `hinted`."""
        self.hints.append(hint)
        if on_answer is not None:
            on_answer(self.hinted)

    def note_prompt(self, note: PromptNote) -> None:
        self.notes.append(note)

    def take_inventory(self) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True
        for session in self.sessions.values():
            session.close()


class StockedClient(LocalClient):
    """Holds a few slots of each group ready, as a real client does: of a small pool fewer."""

    def __init__(self, register: Register, memory: CacheSettings = MEMORY) -> None:
        super().__init__(register, memory)
        self.slots = STOCK if memory.memory_bytes >= MEMORY.memory_bytes else STOCK // 8

    def ready_slots(self) -> list[int]:
        return [min(self.slots, ready) for ready in super().ready_slots()]

    def most_slots(self, group: int) -> int:
        return self.slots


class LocalPlaces:
    """One worker's part of it: all of its client's memory that the test does not withhold."""

    def __init__(self, client: LocalClient) -> None:
        self.client = client
        self.unmapped: set[int] = set()
        """Memories that this worker has not joined yet, or has let go of."""
        self.ready: int | None = None
        """Bytes of each memory that are there; None: all of them."""
        self.pinned: set[int] = set()
        """Segments that are marked as pinned."""
        self.is_closed = False

    def places(self) -> tuple[tuple[int, int], ...]:
        return tuple(place for place in self.client.places() if place[0] not in self.unmapped)

    def may_copy(self, held: Placed) -> bool:
        return (held.memory_id, held.session) in self.places()

    def memory(self, memory_id: int) -> SegmentMap:
        if memory_id in self.unmapped:
            raise ValueError(f"memory {memory_id} is not mapped here")
        return self.client.memory(memory_id)

    def ready_bytes(self, memory_id: int) -> int:
        size_bytes = self.memory(memory_id).size_bytes
        return size_bytes if self.ready is None else min(self.ready, size_bytes)

    def mark_pinned(self, memory_id: int, segment: int, is_pinned: bool) -> None:
        self.memory(memory_id)
        (self.pinned.add if is_pinned else self.pinned.discard)(segment)

    def retire(self, memory_id: int) -> None:
        self.unmapped.add(memory_id)

    def close(self) -> None:
        self.is_closed = True

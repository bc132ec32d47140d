"""Requests for an engine's blocks; the contract on a real server is in test_client.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvoffload.cache import AcquireOutcome, Ask, BlockLease, CacheGeometry, Publication, ReservedSlots
from kvoffload.client.block_calls import BlockCalls, HintSettings, TierWait, cut_batches, read_numbers, to_blob
from kvoffload.client.credit_stock import KEPT_NS
from kvoffload.client.joining import HeldMemory
from kvoffload.client.link import Link
from kvoffload.client.memories import Memories
from kvoffload.client.settings import SECOND_NS, LinkSettings
from kvoffload.protocol import (
    Abort,
    Acquire,
    Acquired,
    Call,
    Closing,
    ClosingReason,
    Credits,
    CreditsGranted,
    Error,
    ErrorCode,
    Hint,
    HintAction,
    Hinted,
    HintOutcome,
    LeasedSlots,
    Prefetch,
    Promote,
    Promoted,
    PromotionOutcome,
    Publish,
    Release,
    TierReach,
)
from kvoffload.protocol.hints import MAX_TTL_MS
from kvoffload.protocol.limits import MAX_BATCH
from tests.kit.cache.cache_model import HYBRID, PLAIN, make_chain
from tests.kit.client.fake_wire import NO_FILE, SETTINGS, FakeMemory, FakeWire, Script, make_link
from tests.kit.server.harness import register_of

CHAIN = make_chain(1, 8)
WAIT_NS = SECOND_NS // 20
SESSION = 0x70005
STOCKED = LinkSettings(stock_slots=(16,))


class FakeIndex:
    """An index that has a chain up to a given length."""

    ready_bytes = 1 << 30
    used_bytes = 0

    def __init__(self) -> None:
        self.boundary = 0
        self.leaving_from = 0

    def lookup(self, _name_space: int, _group: int, hashes: bytes) -> Any:
        return np.arange(len(hashes) // 32) < self.boundary // 16

    def find_boundary(self, _name_space: int, ask: Ask) -> int:
        assert ask.alignment == 1
        return max(min(self.boundary, ask.limit), ask.local)


class IndexedMemory(FakeMemory):
    index = FakeIndex()
    segments = "segments"

    def __init__(self, held: HeldMemory) -> None:
        super().__init__(held)
        self.index = FakeIndex()


class Setting:
    def __init__(self, settings: LinkSettings = SETTINGS, geometry: CacheGeometry = PLAIN, **join: Any) -> None:
        self.wire = FakeWire()
        self.link: Link = make_link(self.wire, settings=settings)
        self.link.memories = Memories(keeps_former=False, open_memory=IndexedMemory, name=lambda held: held.index)
        self.blocks = BlockCalls(self.link, register_of(geometry), settings)
        self.script = Script(self.link, self.wire)
        self.script.join(**join)

    @property
    def index(self) -> FakeIndex:
        memory = self.link.memories.current
        assert isinstance(memory, IndexedMemory)
        return memory.index

    def acquire(self, *, far: TierWait | None = None, **asked: Any) -> Any:
        return self.blocks.start_acquire(Ask(CHAIN, **asked), self.script.now_ns, WAIT_NS, far=far)

    def hit(self, call: Call, *, lease: int = 9) -> None:
        slots = LeasedSlots(first=0, addresses=np.arange(4, dtype="<u8").tobytes())
        answer = Acquired(outcome=AcquireOutcome.HIT, boundary=64, lease=lease, groups=(slots,))
        self.script.answer(call, answer)


def test_a_miss_sends_nothing() -> None:
    setting = Setting()
    pending = setting.acquire()
    assert pending.is_over
    assert not pending.found.is_hit
    setting.index.boundary = 32
    assert setting.acquire(local=32).is_over
    assert setting.wire.take_all() == []


def test_a_hit_is_asked_for_as_far_as_it_goes() -> None:
    setting = Setting()
    setting.index.boundary = 64
    pending = setting.acquire(shards=())
    (call,) = setting.wire.take_all()
    assert call.message == Acquire(name_space=4, chain=CHAIN[: 32 * 4], limit=64)
    assert (pending.is_over, pending.found) == (False, None)
    setting.hit(call)
    assert pending.found.lease == BlockLease(NO_FILE, 9, SESSION)
    assert pending.found.boundary == 64
    assert pending.found.groups[0].addresses.tolist() == [0, 1, 2, 3]
    assert pending.found.groups[0].digests.shape == (0, 4)
    setting.blocks.release(pending.found.lease, 0)
    setting.blocks.release(pending.found.lease, 0)
    assert [call.message for call in setting.wire.take_all()] == [Release(leases=(9).to_bytes(8, "little"))]


def test_of_a_long_chain_the_index_is_asked_for_a_sample_and_the_server_for_all(monkeypatch: Any) -> None:
    setting = Setting()
    chain = make_chain(1, 3000)
    there = {chain[at : at + 32] for at in range(0, 32 * 2700, 32)}
    asked = []

    def lookup(_name_space: int, _group: int, hashes: bytes) -> Any:
        rows = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
        asked.extend(rows)
        return np.array([row in there for row in rows])

    monkeypatch.setattr(setting.index, "lookup", lookup)
    monkeypatch.setattr(setting.index, "find_boundary", None)
    pending = setting.blocks.start_acquire(Ask(chain), setting.script.now_ns, WAIT_NS)
    (call,) = setting.wire.take_all()
    assert call.message == Acquire(name_space=4, chain=chain[: 32 * 2700], limit=16 * 2700)
    assert len(asked) < 300
    # The server looks at each, and may find less.
    setting.hit(call)
    assert pending.found.boundary == 64


def test_what_memory_lacks_is_asked_for_below_with_what_a_token_costs() -> None:
    setting = Setting(capabilities=("promote",))
    setting.index.boundary = 64
    far = TierWait(wait_s=1.5, token_ns=70_000)
    pending = setting.acquire(shards=(), far=far)
    (call,) = setting.wire.take_all()
    assert call.message == Promote(name_space=4, chain=CHAIN, limit=128, wait_ms=1500, prefill_ns=70_000)
    setting.index.boundary = 128
    assert pending.reaches == ()
    reaches = (TierReach(tier="disk", boundary=96), TierReach(tier="valkey", boundary=128))
    setting.script.answer(call, Promoted(outcome=PromotionOutcome.COMPLETE, boundary=128, reaches=reaches))
    setting.blocks.go_on(pending, setting.script.now_ns)
    (call,) = setting.wire.take_all()
    assert call.message == Acquire(name_space=4, chain=CHAIN, limit=128)
    assert pending.in_memory == 64
    assert pending.reaches == (("disk", 96), ("valkey", 128))
    # A chain that memory has whole is not asked for in slower tiers.
    setting.acquire(shards=(), far=far)
    assert [type(call.message) for call in setting.wire.take_all()] == [Acquire]


@pytest.mark.parametrize("outcome", [AcquireOutcome.MISS, AcquireOutcome.OVER_LIMIT, AcquireOutcome.NO_ROOM])
def test_the_server_may_say_no(outcome: AcquireOutcome) -> None:
    setting = Setting()
    setting.index.boundary = 64
    pending = setting.acquire(local=16)
    setting.script.answer(setting.wire.take_all()[0], Acquired(outcome=outcome, boundary=16))
    assert (pending.found.outcome, pending.found.boundary) == (AcquireOutcome[outcome.name], 16)


def test_an_error_and_a_late_answer_are_misses() -> None:
    setting = Setting()
    setting.index.boundary = 64
    pending = setting.acquire()
    setting.script.answer(setting.wire.take_all()[0], Error(code=ErrorCode.DRAINING, message="it ends"))
    assert pending.found.outcome is AcquireOutcome.MISS
    pending = setting.acquire()
    setting.script.look_for(0.06)
    assert pending.found.outcome is AcquireOutcome.MISS
    late = setting.wire.take_all()[0]
    setting.hit(late)
    assert setting.wire.take_all()[-1].message == Release(leases=(9).to_bytes(8, "little"))


def test_a_cancelled_acquire_gives_its_lease_back_whenever_it_comes() -> None:
    setting = Setting()
    setting.index.boundary = 64
    before, after = setting.acquire(), setting.acquire()
    first, second = setting.wire.take_all()
    setting.blocks.cancel(before, 0)
    setting.hit(first, lease=1)
    setting.hit(second, lease=2)
    setting.blocks.cancel(after, 0)
    told = [call.message for call in setting.wire.take_all()]
    assert told == [Release(leases=number.to_bytes(8, "little")) for number in (1, 2)]
    assert not before.found.is_hit
    assert not after.found.is_hit


def test_a_lease_of_former_memory_is_released_without_a_word() -> None:
    """Another server's lease may have the same number."""
    setting = Setting()
    setting.index.boundary = 64
    pending = setting.acquire()
    setting.hit(setting.wire.take_all()[0])
    former = setting.link.memories.current
    assert isinstance(former, IndexedMemory)
    setting.link.hang_up(setting.script.now_ns, "gone")
    setting.script.now_ns += SECOND_NS
    setting.script.join(boot_id=2, memory=NO_FILE + 10)
    assert setting.blocks.memory(NO_FILE) == "segments"
    setting.blocks.release(pending.found.lease, 0)
    assert setting.wire.take_all() == []
    assert former.is_closed


def test_a_request_that_is_lost_with_its_connection_is_a_miss() -> None:
    setting = Setting()
    setting.index.boundary = 64
    pending = setting.acquire()
    setting.link.hang_up(setting.script.now_ns, "gone")
    assert pending.found.outcome is AcquireOutcome.MISS
    # Mapped memory can be looked up all the same.
    assert setting.blocks.lookup(0, CHAIN).sum() == 4


def test_slots_are_asked_for_ahead_and_dropped_with_their_session() -> None:
    setting = Setting(STOCKED)
    now_ns = setting.script.now_ns
    assert len(setting.blocks.take(0, 3, now_ns)) == 0
    (call,) = setting.wire.take_all()
    assert call.message == Credits(name_space=4, group=0, count=16)
    tickets = np.arange(1, 13, dtype="<u8").tobytes()
    setting.script.answer(call, CreditsGranted(tickets=tickets, addresses=tickets))
    assert setting.blocks.take(0, 5, now_ns).tickets.tolist() == [1, 2, 3, 4, 5]
    # There was no room for all; it is not asked at once again.
    assert setting.wire.take_all() == []
    setting.blocks.refill(now_ns + SECOND_NS)
    (call,) = setting.wire.take_all()
    assert call.message == Credits(name_space=4, group=0, count=9)
    setting.link.hang_up(now_ns, "gone")
    setting.script.now_ns += SECOND_NS
    setting.script.join(session=0x70006)
    assert len(setting.blocks.take(0, 5, now_ns)) == 0


@pytest.mark.parametrize(("geometry", "asked"), [(PLAIN, 9), (HYBRID, 28)])
def test_of_a_full_pool_a_hybrid_model_asks_for_what_was_lacking_too(geometry: CacheGeometry, asked: int) -> None:
    """Without its states a prompt's first piece is of no use; of full attention alone it is."""
    setting = Setting(LinkSettings(stock_slots=(1000,)), geometry)
    group = geometry.groups[0]
    setting.index.ready_bytes = setting.index.used_bytes = 300 * group.record_bytes * group.shards
    setting.blocks.refill(setting.script.now_ns)
    (call,) = setting.wire.take_all()
    assert call.message == Credits(name_space=4, group=0, count=9)
    tickets = np.arange(1, 10, dtype="<u8").tobytes()
    setting.script.answer(call, CreditsGranted(tickets=tickets, addresses=tickets))
    assert len(setting.blocks.take(0, 28, setting.script.now_ns)) == 9
    (call,) = setting.wire.take_all()
    assert call.message == Credits(name_space=4, group=0, count=asked)


def test_slots_beyond_the_stock_that_no_save_takes_go_back() -> None:
    """A pool that has become full holds fewer slots ready than it did while it had room."""
    setting = Setting(LinkSettings(stock_slots=(1000,)))
    group = PLAIN.groups[0]
    setting.index.ready_bytes = 320 * group.record_bytes * group.shards
    now_ns = setting.script.now_ns
    setting.blocks.refill(now_ns)
    (call,) = setting.wire.take_all()
    assert call.message == Credits(name_space=4, group=0, count=40)
    tickets = np.arange(1, 41, dtype="<u8")
    setting.script.answer(call, CreditsGranted(tickets=tickets.tobytes(), addresses=tickets.tobytes()))
    setting.index.used_bytes = setting.index.ready_bytes
    setting.blocks.refill(now_ns)
    assert setting.wire.take_all() == []
    setting.blocks.refill(now_ns + KEPT_NS)
    assert [call.message for call in setting.wire.take_all()] == [Abort(tickets=tickets[:30].tobytes())]
    assert setting.blocks.ready_slots(now_ns + KEPT_NS) == [10]
    # The pool has room again, for what was given back. It is asked for when a save takes slots.
    setting.index.used_bytes -= 30 * group.record_bytes
    setting.blocks.refill(now_ns + 2 * KEPT_NS)
    assert setting.wire.take_all() == []
    setting.blocks.take(0, 1, now_ns + 2 * KEPT_NS)
    assert [call.message for call in setting.wire.take_all()] == [Credits(name_space=4, group=0, count=31)]


def test_slots_in_memory_that_the_server_gives_back_to_the_system_go_back_at_once() -> None:
    setting = Setting(STOCKED)
    now_ns = setting.script.now_ns
    setting.blocks.refill(now_ns)
    (call,) = setting.wire.take_all()
    tickets = np.arange(1, 17, dtype="<u8")
    addresses = tickets * 100
    setting.script.answer(call, CreditsGranted(tickets=tickets.tobytes(), addresses=addresses.tobytes()))
    setting.index.leaving_from = 1500
    setting.blocks.refill(now_ns)
    assert [call.message for call in setting.wire.take_all()] == [Abort(tickets=tickets[14:].tobytes())]
    assert setting.blocks.take(0, 16, now_ns).addresses.max() == 1400


def test_a_server_that_ends_gets_its_slots_back_and_is_asked_for_none() -> None:
    """Whenever they come: it waits for them."""
    setting = Setting(STOCKED)
    setting.blocks.refill(setting.script.now_ns)
    (call,) = setting.wire.take_all()
    setting.script.tell(Closing(reason=ClosingReason.DRAINED))
    setting.blocks.refill(setting.script.now_ns)
    assert setting.wire.take_all() == []
    tickets = np.arange(1, 17, dtype="<u8").tobytes()
    setting.script.answer(call, CreditsGranted(tickets=tickets, addresses=tickets))
    setting.blocks.refill(setting.script.now_ns)
    assert [call.message for call in setting.wire.take_all()] == [Abort(tickets=tickets)]
    setting.blocks.refill(setting.script.now_ns + SECOND_NS)
    assert setting.wire.take_all() == []
    setting.link.hang_up(setting.script.now_ns, "gone")
    setting.script.now_ns += SECOND_NS
    setting.script.join(boot_id=2, memory=NO_FILE + 10)
    setting.blocks.refill(setting.script.now_ns)
    assert [type(call.message) for call in setting.wire.take_all()] == [Credits]


def test_slots_of_a_session_that_goes_on_are_kept() -> None:
    setting = Setting(STOCKED)
    setting.blocks.refill(setting.script.now_ns)
    tickets = np.arange(1, 17, dtype="<u8").tobytes()
    setting.script.answer(setting.wire.take_all()[0], CreditsGranted(tickets=tickets, addresses=tickets))
    setting.link.hang_up(setting.script.now_ns, "gone")
    setting.script.now_ns += SECOND_NS
    setting.script.join(is_reopened=True)
    assert len(setting.blocks.take(0, 5, setting.script.now_ns)) == 5


def test_a_tenant_goes_by_its_place_among_those_that_the_server_named() -> None:
    setting = Setting(tenants=("one", "two"))
    slots = ReservedSlots(NO_FILE, SESSION, 0, np.array([7], np.uint64), np.array([0], np.uint64))
    for tenant in ("two", "one", "unknown", ""):
        assert setting.blocks.publish(Publication(slots, hashes=CHAIN[:32], tenant=tenant), 0)
    assert [call.message.tenant for call in setting.wire.take_all()] == [2, 1, 0, 0]


def test_large_batches_are_cut() -> None:
    setting = Setting()
    count = MAX_BATCH + 5
    tickets = np.arange(count, dtype=np.uint64)  # the first one is no slot
    slots = ReservedSlots(NO_FILE, SESSION, 0, tickets, tickets)
    hashes = np.arange(count * 4, dtype="<u8").tobytes()
    setting.blocks.publish(Publication(slots, hashes=hashes, parents=hashes, digests=tickets + np.uint64(1)), 0)
    first, second = (call.message for call in setting.wire.take_all())
    assert isinstance(first, Publish)
    assert isinstance(second, Publish)
    assert (len(first.tickets), len(second.tickets)) == (8 * MAX_BATCH, 8 * 4)
    assert first.hashes + second.hashes == first.parents + second.parents == hashes[32:]
    assert first.digests + second.digests == (tickets[1:] + np.uint64(1)).tobytes()
    setting.blocks.abort(slots, 0)
    aborts = [call.message for call in setting.wire.take_all()]
    assert b"".join(abort.tickets for abort in aborts if isinstance(abort, Abort)) == tickets[1:].tobytes()


def test_a_prefetch_is_a_hint() -> None:
    setting = Setting()
    setting.blocks.prefetch(Ask(CHAIN, local=16), 0)
    assert [call.message for call in setting.wire.take_all()] == [Prefetch(name_space=4, chain=CHAIN, local=16)]
    setting.link.hang_up(0, "gone")
    setting.blocks.prefetch(Ask(CHAIN, local=32), 0)
    setting.script.now_ns += SECOND_NS
    assert setting.script.join(boot_id=2, memory=NO_FILE + 10) == []


def test_a_hint_is_asked_of_a_server_that_takes_them_only() -> None:
    wanted = HintSettings(action=HintAction.RETAIN, chain=CHAIN, session="s", ttl_s=1e9, priority=2, tenant="second")
    setting = Setting(tenants=("first", "second"))
    assert setting.blocks.start_hint(wanted, 0).is_over
    assert setting.wire.take_all() == []
    setting = Setting(tenants=("first", "second"), capabilities=("hints",))
    pending = setting.blocks.start_hint(wanted, setting.script.now_ns)
    (call,) = setting.wire.take_all()
    assert call.message == Hint(
        name_space=4, action=HintAction.RETAIN, chain=CHAIN, session="s", ttl_ms=MAX_TTL_MS, priority=2, tenant=2
    )
    setting.script.answer(call, Hinted(outcome=HintOutcome.DONE, tokens=64))
    assert pending.answer == Hinted(outcome=HintOutcome.DONE, tokens=64)


def test_what_is_on_its_way_at_the_end_is_given_back() -> None:
    setting = Setting(replace(SETTINGS, stock_slots=(64,)))
    setting.index.boundary = 64
    setting.wire.take_all()
    pending = setting.acquire()
    reserving = setting.blocks.start_reserve(0, setting.script.now_ns, count=1)
    setting.blocks.refill(setting.script.now_ns)
    calls = setting.wire.take_all()
    setting.blocks.close(setting.script.now_ns)
    setting.wire.take_all()
    for ticket, call in enumerate(calls, 1):
        if isinstance(call.message, Credits):
            tickets = ticket.to_bytes(8, "little")
            setting.script.answer(call, CreditsGranted(tickets=tickets, addresses=tickets))
        else:
            setting.hit(call)
    given_back = [call.message for call in setting.wire.take_all()]
    assert [type(message) for message in given_back].count(Release) == 1
    assert [type(message) for message in given_back].count(Abort) == len(calls) - 1 >= 2
    assert (pending.is_over, pending.found.is_hit) == (True, False)
    assert (reserving.is_over, len(reserving.slots)) == (True, 0)


def test_what_is_chosen_fits_messages() -> None:
    chosen = np.ones(MAX_BATCH + 3, np.bool_)
    chosen[1] = False
    parts = list(cut_batches(chosen))
    assert [len(part) for part in parts] == [MAX_BATCH, 2]
    assert np.concatenate(parts).tolist() == [0, *range(2, MAX_BATCH + 3)]
    assert list(cut_batches(np.zeros(5, np.bool_))) == []


def test_numbers_are_little_endian() -> None:
    assert read_numbers(b"\x01" + bytes(7)).tolist() == [1]
    assert to_blob(np.array([1, 2**63], np.uint64)) == b"\x01" + bytes(14) + b"\x80"

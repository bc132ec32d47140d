"""An engine's calls about blocks, turned into messages and look-ups. Pure, like the link that it uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload.cache import (
    NO_LIMIT,
    AcquiredBlocks,
    AcquireOutcome,
    Ask,
    BlockLease,
    LeasedGroup,
    Publication,
    ReservedSlots,
)
from kvoffload.client.credit_stock import CreditStock, fit_stocks
from kvoffload.client.lanes import Pending, make_ended
from kvoffload.client.link import Link
from kvoffload.client.memories import MappedBlocks
from kvoffload.client.settings import SECOND_NS, LinkSettings
from kvoffload.hash_rows import choose_rows, count_hashes
from kvoffload.protocol import (
    Abort,
    Acquire,
    Acquired,
    AcquireEntries,
    Credits,
    CreditsGranted,
    Hint,
    HintAction,
    Invalidate,
    Prefetch,
    Promote,
    Promoted,
    PromotionOutcome,
    Publish,
    Register,
    Release,
    ServerMessage,
)
from kvoffload.protocol.hints import MAX_TTL_MS
from kvoffload.protocol.limits import MAX_BATCH, MAX_BLOCKS
from kvoffload.types import HASH_BYTES, ReuseRule

_WIRE = np.dtype("<u8")
_NO_NUMBERS = np.empty(0, np.uint64)
_WITHOUT_ROOM_NS = SECOND_NS // 20
_LONG_CHAIN = 2048
"""Chains from this length on are sampled: the server checks each block of an acquire anyway, and checking all of
them here takes too long."""


@dataclass(frozen=True, kw_only=True)
class TierWait:
    """How long a request would wait for blocks in tiers slower than the server's memory."""

    wait_s: float
    token_ns: int = 0
    """Time that the engine takes to compute a token, in nanoseconds; 0: unknown."""


@dataclass(frozen=True, kw_only=True)
class HintSettings:
    """A hint: what the server should do with a prefix, before its request comes or after it."""

    action: HintAction
    chain: Buffer = b""
    """May be empty where a session is named."""
    limit: int = NO_LIMIT
    """Number of tokens of the chain to which the hint applies."""
    session: str = ""
    ttl_s: float = 0.0
    """0: as long as the server retains what comes without a wish."""
    priority: int = 0
    tenant: str = ""
    """Tenant whose share pays, if the session may name it; otherwise the session's own tenant pays."""


@dataclass(eq=False)
class PendingAcquire:
    """An acquire on its way. A hit is held from the moment on at which it is over."""

    local: int
    wait_ns: int = 0
    """How long the answer of memory is waited for, in nanoseconds."""
    found: AcquiredBlocks | None = None
    request: Pending | None = None
    """The request under way, or None if the server was not asked."""
    then: Ask | None = None
    """The look-up in memory that follows when slower tiers have done what they can, or None."""
    promotion: Pending | None = None
    """The request to slower tiers, or None if they were not asked."""
    in_memory: int = NO_LIMIT
    """The boundary that memory alone had when slower tiers were asked."""

    @property
    def is_over(self) -> bool:
        return self.found is not None

    @property
    def reaches(self) -> tuple[tuple[str, int], ...]:
        """The tiers that were asked to bring a part, the nearest first, each with the boundary of memory and the tiers
        up to it. Servers before this field, and those whose answer was late, name none."""
        answer = None if self.promotion is None else self.promotion.answer
        return tuple((one.tier, one.boundary) for one in answer.reaches) if isinstance(answer, Promoted) else ()

    @property
    def came_late(self) -> bool:
        """Slower tiers had more than came in time."""
        if self.promotion is None:
            return False
        answer = self.promotion.answer
        return not isinstance(answer, Promoted) or answer.outcome in (
            PromotionOutcome.PARTLY,
            PromotionOutcome.TOO_SLOW,
        )


@dataclass(eq=False)
class PendingSlots:
    """Slots that were asked for."""

    slots: ReservedSlots
    request: Pending | None = None
    is_over: bool = False


class BlockCalls(MappedBlocks):
    """Calls about blocks, and the look-ups that they need. The caller holds the client's lock."""

    def __init__(self, link: Link, register: Register | None, settings: LinkSettings) -> None:
        """Without a register, as an observer has none, there are no groups."""
        groups = () if register is None else register.groups
        super().__init__(link.memories, groups=len(groups))
        self._link = link
        self._hash_block_size = 1 if register is None else register.hash_block_size
        self._settings = settings
        wanted = (*settings.stock_slots, *[0] * len(groups))
        self._stocks = [
            CreditStock(
                number,
                wanted[number],
                slot_bytes=group.record_bytes * group.shards,
                whole=-(-group.window // group.block_size) + 1,
            )
            for number, group in enumerate(groups)
        ]
        self._is_hybrid = any(group.reuse is not ReuseRule.PREFIX for group in groups)
        """With hybrid models, blocks are useless until their windows or states are there too, and the other way round:
        a full pool evicts the first pieces of a prompt that is saved in pieces. So more slots are asked for. With full
        attention alone, more slots held ready would only take the place of blocks."""
        self._has_own_hashes = all(group.block_size == self._hash_block_size for group in groups)
        self._stocked_in = 0
        """The link's number of the session to which the slots in stock belong."""
        self._leases: set[BlockLease] = set()

    # ---- loads ----

    def start_acquire(self, ask: Ask, now_ns: int, wait_ns: int, *, far: TierWait | None = None) -> PendingAcquire:
        """Only what the index says is a hit is asked for; with `far`, when slower tiers have done what they can. Of a
        long chain the index is asked for a sample."""
        pending = PendingAcquire(local=ask.local, wait_ns=wait_ns)
        mapped = self._memories.mapped
        may_estimate = far is None and self._has_own_hashes and not self._is_hybrid
        if may_estimate and count_hashes(ask.chain) >= _LONG_CHAIN:
            boundary = self.estimate_boundary(ask, block_tokens=self._hash_block_size)
        else:
            boundary = self.find_boundary(ask)
        most = min(count_hashes(ask.chain) * self._hash_block_size, ask.limit) // ask.alignment * ask.alignment
        if far is None or mapped is None or boundary >= most or not self._link.has("promote"):
            self._acquire(pending, ask, now_ns, boundary)
            return pending
        # The caller may reuse its buffer before the answer comes.
        chain = bytes(ask.chain)
        message = Promote(
            name_space=mapped[1],
            chain=chain[: HASH_BYTES * MAX_BLOCKS],
            local=ask.local,
            limit=most,
            alignment=ask.alignment,
            wait_ms=int(far.wait_s * 1000),
            prefill_ns=far.token_ns,
        )
        pending.then, pending.in_memory = ask._replace(chain=chain), boundary
        pending.promotion = self._link.ask(message, now_ns, int(far.wait_s * SECOND_NS) + wait_ns)
        pending.request = pending.promotion
        self.go_on(pending, now_ns)
        return pending

    def go_on(self, pending: PendingAcquire, now_ns: int) -> None:
        """Asks for what has come up meanwhile."""
        ask, request = pending.then, pending.request
        if ask is not None and request is not None and request.is_over:
            pending.then = None
            boundary = self.find_boundary(ask)
            if not pending.is_over:
                self._acquire(pending, ask, now_ns, boundary)

    def start_acquire_entries(
        self, group: int, hashes: Buffer, now_ns: int, wait_ns: int, *, shards: Sequence[int] = ()
    ) -> PendingAcquire:
        pending = PendingAcquire(local=0, wait_ns=wait_ns)
        mapped = self._memories.mapped
        if not self.lookup(group, hashes).all() or mapped is None or not self._link.is_serving:
            pending.found = AcquiredBlocks(AcquireOutcome.MISS, 0)
            return pending
        message = AcquireEntries(name_space=mapped[1], group=group, hashes=bytes(hashes), shards=tuple(shards))
        return self._start(pending, message, now_ns)

    def cancel(self, pending: PendingAcquire, now_ns: int) -> None:
        """Ends a call as a miss. A lease that it has brought, or that its answer still brings, is given back."""
        if pending.request is not None:
            pending.request.is_wanted = False
        if pending.found is not None and pending.found.lease is not None:
            self.release(pending.found.lease, now_ns)
        pending.found = AcquiredBlocks(AcquireOutcome.MISS, pending.local)

    def release(self, lease: BlockLease, now_ns: int) -> None:
        if lease not in self._leases:
            return
        self._leases.discard(lease)
        if lease.memory_id == self.memory_id:
            self._link.tell(Release(leases=lease.number.to_bytes(8, "little")), now_ns)
        self._link.memories.let_go(lease.memory_id)

    def prefetch(self, ask: Ask, now_ns: int) -> None:
        """A hint, which may be dropped."""
        if self._memories.mapped is not None and self._link.is_serving:
            chain = bytes(memoryview(ask.chain).cast("B")[: HASH_BYTES * MAX_BLOCKS])
            name_space = self._memories.mapped[1]
            message = Prefetch(name_space=name_space, chain=chain, local=ask.local, limit=ask.limit)
            self._link.tell(message, now_ns)

    def start_hint(self, hint: HintSettings, now_ns: int) -> Pending:
        """Over at once, without an answer, where the server takes none."""
        mapped = self._memories.mapped
        message = Hint(
            name_space=0 if mapped is None else mapped[1],
            action=hint.action,
            chain=bytes(memoryview(hint.chain).cast("B")[: HASH_BYTES * MAX_BLOCKS]),
            limit=hint.limit,
            session=hint.session,
            ttl_ms=min(int(hint.ttl_s * 1000), MAX_TTL_MS),
            priority=hint.priority,
            tenant=self._link.tenants.get(hint.tenant, 0),
        )
        if mapped is None or not self._link.is_serving or not self._link.has("hints"):
            return make_ended(message, now_ns)
        return self._link.ask(message, now_ns, self._settings.call_ns)

    # ---- saves ----

    @property
    def stocks(self) -> list[CreditStock]:
        """The slots held ready, by group. Those of an earlier session are gone: they belong to this process no more."""
        if self._stocked_in != self._link.sessions:
            self._stocked_in = self._link.sessions
            for stock in self._stocks:
                stock.clear()
        return self._stocks

    def most_slots(self, group: int) -> int:
        """Returns how many slots are held ready at best."""
        self.check_group(group)
        # Any thread may ask, so the stocks are left as they are.
        return self._stocks[group].high

    def ready_slots(self, now_ns: int) -> list[int]:
        """Returns how many slots `take` would give now, by group; where they run low, more are asked for."""
        self.refill(now_ns)
        return [len(stock) for stock in self.stocks]

    @property
    def is_low(self) -> bool:
        """More slots are on their way, or should be."""
        return any(stock.is_asking or stock.is_low for stock in self._stocks)

    def take(self, group: int, count: int, now_ns: int) -> ReservedSlots:
        """Slots that are held ready, as many as there are; more are asked for."""
        self.check_group(group)
        stock = self.stocks[group]
        if self._is_hybrid:
            stock.lacking = max(stock.lacking, count - len(stock))
        taken = stock.take(self.memory_id, self.session, count)
        self.refill(now_ns)
        return taken

    def refill(self, now_ns: int) -> None:
        """Asks for slots where too few are held ready. A server that ends gets them back."""
        mapped = self._memories.mapped
        if mapped is None or not self._link.is_serving:
            return
        # The pool grows, and fills.
        stocks = self.stocks
        pool_bytes, is_full = mapped[0].index.ready_bytes, not self.has_room
        leaving = mapped[0].index.leaving_from
        fit_stocks(stocks, pool_bytes, is_full=is_full)
        for stock in stocks:
            is_closing = self._link.is_closing
            # The server gives the memory from there on back to the system.
            if leaving and (slots := stock.take_from(self.memory_id, self.session, leaving)):
                self.abort(slots, now_ns)
            if spare := len(stock) if is_closing else stock.surplus(now_ns):
                self.abort(stock.take(self.memory_id, self.session, spare), now_ns)
                stock.waits_for_save = True
            count = 0 if is_closing else stock.missing(now_ns)
            if count:
                stock.asked = count
                stock.lacking = 0
                # The next group cannot have the bytes that this one gets beyond its limit.
                fit_stocks(stocks, pool_bytes, is_full=is_full)
                message = Credits(name_space=mapped[1], group=stock.group, count=count)
                request = self._link.ask(message, now_ns, self._settings.call_ns)
                request.when_over(partial(self._put, stock, request))

    def start_reserve(self, group: int, now_ns: int, *, count: int = 0, hashes: Buffer | None = None) -> PendingSlots:
        self.check_group(group)
        names = b"" if hashes is None else bytes(hashes)
        pending = PendingSlots(ReservedSlots(self.memory_id, self.session, group, _NO_NUMBERS, _NO_NUMBERS))
        if self._memories.mapped is None or not self._link.is_serving or (hashes is not None and not names):
            pending.is_over = True
            return pending
        message = Credits(name_space=self._memories.mapped[1], group=group, count=min(count, MAX_BATCH), hashes=names)
        request = pending.request = self._link.ask(message, now_ns, self._settings.call_ns)

        def end() -> None:
            answer = request.answer
            if isinstance(answer, CreditsGranted):
                tickets, addresses = read_numbers(answer.tickets), read_numbers(answer.addresses)
                pending.slots = replace(pending.slots, tickets=tickets, addresses=addresses)
            pending.is_over = True

        request.when_over(end)
        return pending

    def cancel_slots(self, pending: PendingSlots, now_ns: int) -> None:
        """Gives back the slots that were granted, and those that an answer still grants."""
        if pending.request is not None:
            pending.request.is_wanted = False
        self.abort(pending.slots, now_ns)

    def publish(self, publication: Publication, now_ns: int) -> bool:
        mapped, slots = self._memories.mapped, publication.slots
        if mapped is None or slots.memory_id != mapped[0].memory_id:
            return False
        parents, digests, shards = publication.parents, publication.digests, publication.shards
        totals = None if digests is None else np.asarray(digests, np.uint64).reshape(shards, len(slots))
        for part in cut_batches(slots.tickets != 0, values=shards):
            message = Publish(
                name_space=mapped[1],
                group=slots.group,
                shard=publication.shard,
                tickets=to_blob(slots.tickets[part]),
                hashes=choose_rows(publication.hashes, part),
                parents=b"" if parents is None else choose_rows(parents, part),
                digests=b"" if totals is None else to_blob(totals[:, part]),
                tenant=self._link.tenants.get(publication.tenant, 0),
                more_shards=shards - 1,
            )
            self._link.tell(message, now_ns)
        return True

    def abort(self, slots: ReservedSlots, now_ns: int) -> None:
        if slots.memory_id == self.memory_id != 0:
            for part in cut_batches(slots.tickets != 0):
                self._link.tell(Abort(tickets=to_blob(slots.tickets[part])), now_ns)

    def invalidate(self, group: int, hashes: Buffer, now_ns: int) -> None:
        self.check_group(group)
        if self._memories.mapped is not None:
            count = count_hashes(hashes)
            for part in cut_batches(np.ones(count, np.bool_)):
                message = Invalidate(name_space=self._memories.mapped[1], group=group, hashes=choose_rows(hashes, part))
                self._link.tell(message, now_ns)

    def close(self, now_ns: int) -> None:
        """Gives back leases, slots that are held ready, and what is on its way."""
        self._link.lanes.forget()
        for lease in list(self._leases):
            self.release(lease, now_ns)
        for stock in self.stocks:
            self.abort(stock.take(self.memory_id, self.session, len(stock)), now_ns)
        self._memories.mapped = None

    # ---- inside ----

    def _acquire(self, pending: PendingAcquire, ask: Ask, now_ns: int, boundary: int) -> None:
        mapped = self._memories.mapped
        if mapped is None or boundary == pending.local or not self._link.is_serving:
            pending.found = AcquiredBlocks(AcquireOutcome.MISS, pending.local)
            return
        message = Acquire(
            name_space=mapped[1],
            # As far as it matters; what a later block would add, the server could not lease now either.
            chain=bytes(ask.chain)[: HASH_BYTES * min(-(-boundary // self._hash_block_size), MAX_BLOCKS)],
            local=pending.local,
            limit=boundary,
            alignment=ask.alignment,
            shards=tuple(ask.shards),
        )
        self._start(pending, message, now_ns)

    def _start(self, pending: PendingAcquire, message: Acquire | AcquireEntries, now_ns: int) -> PendingAcquire:
        memory_id = self.memory_id
        request = pending.request = self._link.ask(message, now_ns, pending.wait_ns)

        def end() -> None:
            pending.found = self._read_acquired(request.answer, memory_id, pending.local, len(message.shards))

        request.when_over(end)
        return pending

    def _put(self, stock: CreditStock, request: Pending) -> None:
        stock.asked = 0
        assert isinstance(request.message, Credits)
        granted = 0
        if isinstance(request.answer, CreditsGranted):
            tickets = read_numbers(request.answer.tickets)
            granted = len(tickets)
            stock.put(tickets, read_numbers(request.answer.addresses))
        if granted < request.message.count:
            stock.not_before_ns = request.sent_ns + _WITHOUT_ROOM_NS

    def _read_acquired(self, answer: ServerMessage | None, memory_id: int, local: int, shards: int) -> AcquiredBlocks:
        if not isinstance(answer, Acquired) or not answer.lease:
            outcome = answer.outcome if isinstance(answer, Acquired) else AcquireOutcome.MISS
            return AcquiredBlocks(outcome, local)
        lease = BlockLease(memory_id, answer.lease, self.session)
        self._leases.add(lease)
        self._link.memories.hold(memory_id)
        groups = []
        for group in answer.groups:
            addresses = read_numbers(group.addresses)
            digests = read_numbers(group.digests) if group.digests else np.zeros(shards * len(addresses), np.uint64)
            groups.append(LeasedGroup(group.first, addresses, digests.reshape(shards, len(addresses))))
        return AcquiredBlocks(AcquireOutcome.HIT, answer.boundary, lease, tuple(groups))


def cut_batches(chosen: npt.NDArray[np.bool_], *, values: int = 1) -> Iterator[npt.NDArray[np.intp]]:
    """Positions of what was chosen, in parts that fit a message which has at most so many values for each."""
    positions = np.flatnonzero(chosen)
    batch = max(MAX_BATCH // values, 1)
    for start in range(0, len(positions), batch):
        yield positions[start : start + batch]


def read_numbers(blob: bytes) -> npt.NDArray[np.uint64]:
    return np.frombuffer(blob, _WIRE).astype(np.uint64, copy=False)


def to_blob(numbers: npt.NDArray[np.uint64]) -> bytes:
    return numbers.astype(_WIRE, copy=False).tobytes()

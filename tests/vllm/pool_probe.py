"""The blocks that one engine has in its server's pool. Everything here runs in the process of the engine's scheduler.

A server's index tells whether a name is there, but cannot list names. So the probe keeps a log of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvoffload.cache import CacheGeometry, CacheGroup, CacheStats, GroupRule, Publication
from kvoffload.client import Client, ClientSettings, LinkSettings, Member, describe_blocks
from kvoffload.errors import ServerError
from kvoffload.kvspec import ReuseRule
from kvoffload.protocol import Role
from kvoffload.types import HASH_BYTES, Fingerprint

if TYPE_CHECKING:
    from kvoffload.connector.scheduler_side import SchedulerSide

MAX_LOOKS = 1000
STOCKED_SLOTS = 8
JOIN_TIMEOUT_S = 30.0
GROWTH_TIMEOUT_S = 60.0
LOOK_S = 0.1
SMALL_POOL_BYTES = 1 << 30


class Entry(NamedTuple):
    """A readable block: its record lies at `address` of the pool, that of each rank behind the one before."""

    group: int
    name: str
    address: int


class PublishLog:
    """The blocks that an engine has published since it was told last to forget everything."""

    def __init__(self, side: SchedulerSide) -> None:
        """Notes what is published from now on."""
        assert side.parts is not None
        self._side: Any = side
        self._client: Any = side.parts.cache
        self._generation = side.masks.generation
        self._names: dict[tuple[int, bytes], None] = {}
        publish = self._client.publish

        def watched(publication: Publication) -> bool:
            self._note(publication.slots.group, bytes(publication.hashes))
            return bool(publish(publication))

        self._client.publish = watched

    def names(self) -> list[tuple[int, bytes]]:
        """(group, name) of those that are readable, as they were published."""
        if self._generation != self._side.masks.generation:
            return []
        settle(self._side)
        return [(group, name) for group, name in self._names if self._client.lookup(group, name).all()]

    def entries(self) -> list[Entry]:
        """Returns the same blocks with their addresses. Where the server checks bytes before every lease, it checks
        them now."""
        found = []
        for group, name in self.names():
            with unhurried(self._client):
                acquired = self._client.acquire_entries(group, name)
            if acquired.lease is not None:
                self._client.release(acquired.lease)
                found.append(Entry(group, name.hex(), int(acquired.groups[0].addresses[0])))
        settle(self._side)
        return found

    def _note(self, group: int, hashes: bytes) -> None:
        if self._generation != self._side.masks.generation:
            self._generation = self._side.masks.generation
            self._names.clear()
        for at in range(0, len(hashes), HASH_BYTES):
            self._names[group, hashes[at : at + HASH_BYTES]] = None


def follow(side: SchedulerSide) -> PublishLog:
    """The engine's log, begun now if there is none. From now on a small pool is whole: its growth on a busy machine
    must not decide which blocks it has room for."""
    assert side.parts is not None
    client: Any = side.parts.cache
    if not hasattr(client, "publish_log"):
        with suppress(ServerError), unhurried(client):
            if client.stats().capacity_bytes <= SMALL_POOL_BYTES:
                _await_whole_pool(side)
        client.publish_log = PublishLog(side)
    log: PublishLog = client.publish_log
    return log


def count_pool(side: SchedulerSide) -> dict[str, int]:
    """Counts of the server's pool when it has been told everything. Slots that are held ready count as free."""
    stats, stock = settle(side)
    return {
        "readable": stats.readable,
        "reserved": stats.reserved - stock,
        "quarantined": stats.quarantined,
        "leases": stats.leases,
        "used_bytes": stats.used_bytes,
        "stored_bytes": stats.used_bytes - _count_stock_bytes(side),
        "evicted": stats.evicted,
        "mismatches": stats.mismatches,
        "sessions": stats.sessions,
    }


def count_tenants(side: SchedulerSide) -> dict[str, int]:
    """Bytes that each tenant of the server pays for, with the slots that are held ready."""
    stats, _ = settle(side)
    return {tenant.name: tenant.used_bytes for tenant in stats.tenants}


def count_held(side: SchedulerSide) -> dict[str, int]:
    """Counts everything that the scheduler side keeps for requests, transfers and their blocks; all of it ends with
    them."""
    assert side.parts is not None
    restores, saves = side.parts.restores, side.parts.saves
    return {
        "requests": len(side.requests),
        "questions": len(restores.questions),
        "failed": len(restores.failed),
        "loads": restores.pending,
        "unsent": len(restores.unsent) + len(restores.doomed),
        "admission": len(restores.admission.reserved),
        "saves": saves.pending,
        "on_the_way": saves.blocks_under_way,
        "pins": side.parts.pins.count,
    }


def settle(side: SchedulerSide) -> tuple[CacheStats, int]:
    """Waits until the server has handled everything and no request is under way. Returns its counts, and the slots held
    ready."""
    assert side.parts is not None
    client: Any = side.parts.cache
    for _ in range(MAX_LOOKS):
        before = _count_stock(client)
        with unhurried(client):
            stats = _await_stats(client)
        if before is not None and before == _count_stock(client):
            return stats, before
    raise AssertionError("the client asks for slots without end")


def _await_stats(client: Any) -> CacheStats:
    """On a busy machine, a link may end and come back while the server is asked."""
    deadline = time.monotonic() + GROWTH_TIMEOUT_S
    while True:
        try:
            return client.stats()
        except ServerError:
            if time.monotonic() > deadline:
                raise
            client.wait_until_served(LOOK_S)


def _await_whole_pool(side: SchedulerSide) -> CacheStats:
    """A server serves from its first memory on, and has the rest a little later."""
    deadline = time.monotonic() + GROWTH_TIMEOUT_S
    while time.monotonic() < deadline:
        stats, _ = settle(side)
        if stats.ready_bytes == stats.capacity_bytes:
            return stats
        time.sleep(0.01)
    raise AssertionError(
        f"after {GROWTH_TIMEOUT_S} s only {stats.ready_bytes} of {stats.capacity_bytes} bytes are there"
    )


@contextmanager
def unhurried(client: Any) -> Iterator[None]:
    """Calls within it may take more than is left of the engine's step."""
    budget_ns, client.budget_ns = client.budget_ns, -1
    try:
        yield
    finally:
        client.budget_ns = budget_ns


@contextmanager
def hurried(client: Any) -> Iterator[None]:
    """An answer within it that comes later than it may by default is a miss."""
    settings = client.settings
    client.settings = replace(
        settings, link=replace(settings.link, acquire_deadline_s=LinkSettings().acquire_deadline_s)
    )
    try:
        yield
    finally:
        client.settings = settings


def _count_stock(client: Any) -> int | None:
    with client.lock:
        stocks = client.blocks.stocks
        return None if any(stock.is_asking for stock in stocks) else sum(map(len, stocks))


def _count_stock_bytes(side: SchedulerSide) -> int:
    """Counts the bytes of the pool that the slots held ready take."""
    client: Any = side.parts.cache  # type: ignore[union-attr]
    with client.lock:
        return sum(len(stock) * stock.slot_bytes for stock in client.blocks.stocks)


class Squatter:
    """Another client of the engine's server, which leaves the engine little room."""

    def __init__(self, side: SchedulerSide, *, leaves_bytes: int) -> None:
        """Leaves so many bytes for the engine's readable blocks, in addition to the few slots that it holds ready from
        now on."""
        assert side.parts is not None
        self._engine: Any = side.parts.cache
        (record_bytes,) = {facts.record_bytes for facts in side.parts.groups.facts}
        self._stocks = [(stock, stock.wanted) for stock in self._engine.blocks.stocks]
        for stock, _ in self._stocks:
            stock.wanted = stock.high = STOCKED_SLOTS
            surplus = stock.take(self._engine.memory_id, self._engine.session, max(len(stock) - STOCKED_SLOTS, 0))
            self._engine.abort(surplus)
        stats = _await_whole_pool(side)
        free = (stats.capacity_bytes - leaves_bytes) // record_bytes - stats.reserved
        rule = GroupRule(block_size=16, reuse=ReuseRule.PREFIX)
        geometry = CacheGeometry(hash_block_size=16, groups=[CacheGroup(rule=rule, record_bytes=record_bytes)])
        self._client = Client(
            ClientSettings(
                socket=self._engine.wire.path,
                member=Member(engine="squatter", role=Role.SCHEDULER, pid=os.getpid()),
                register=describe_blocks(Fingerprint(bytes(32)), geometry, hash_algorithm="sha256"),
            )
        ).start()
        assert self._client.wait_until_served(JOIN_TIMEOUT_S), self._client.fault
        self._slots = self._client.reserve(0, count=free)
        assert len(self._slots) == free, f"{len(self._slots)} of {free} slots were to be had"

    def close(self) -> None:
        """Everything is the engine's again."""
        for stock, wanted in self._stocks:
            stock.wanted = wanted
        self._client.abort(self._slots)
        self._client.close()

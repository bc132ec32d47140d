"""A server's memory and its links, without a control channel: any caller gets a session."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CacheGeometry, CacheGroup, CacheSettings, GroupRule, LocalCache, StoredBlocks
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.kvspec import ReuseRule
from kvoffload.peers.control_link import LinkTicket
from kvoffload.peers.peer_access import PeerAccess
from kvoffload.peers.peer_server import PeerServer
from kvoffload.peers.peer_store import PeerStoreSettings
from kvoffload.peers.space_table import PeerSpace, SpaceTable
from kvoffload.tiers.base import RecordNames
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.types import Fingerprint
from kvoffload.units import MIB

LOOPBACK = TcpAddress("127.0.0.1", 0)


def same_groups(record_bytes: int, *, groups: int = 3, shards: int = 1) -> CacheGeometry:
    """Groups whose records have one size."""
    group = CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=record_bytes, shards=shards)
    return CacheGeometry(hash_block_size=16, groups=(group,) * groups)


@dataclass(eq=False)
class OnePeer:
    """`there` is what the peer knows, `here` what its client does. It is also the client's control link."""

    cache: LocalCache
    server: PeerServer
    there: SpaceTable
    here: SpaceTable = field(default_factory=SpaceTable)
    stored: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    removed: list[tuple[int, bytes]] = field(default_factory=list)
    below: set[bytes] = field(default_factory=set)
    """Names of blocks in a slower tier. The test has to promote them itself."""
    brought: list[tuple[int, bytes, float]] = field(default_factory=list)
    refuses: bool = False
    """Whether the server refuses peers that introduce themselves."""
    introduced: int = 0
    is_stuck: bool = False
    """The loop does nothing in time."""
    coding: Coding = Coding.OFF
    """The coding that its client uses."""
    is_lost: bool = False
    """The server has forgotten all sessions."""

    def find_ticket(self, *, is_sealed: bool) -> LinkTicket:
        session = self.server.open_session("one", "")
        return LinkTicket(self.server.address, b"?" * 16 if self.is_lost else session.token, session.secret)

    def forget_ticket(self, ticket: LinkTicket) -> None:
        self.is_lost = False

    def introduce(self, space: PeerSpace) -> bool:
        self.introduced += 1
        if self.refuses:
            return False
        self.teach(self.there, space.fingerprint, space.geometry)
        return True

    # ---- the server's loop ----

    def tell_stored(self, space: PeerSpace, stored: StoredBlocks) -> None:
        self.stored.append(stored)

    def remove(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> bool:
        self.removed.append((group, hashes))
        return not self.is_stuck

    def find_below(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.array([names.hashes[at : at + 32] in self.below for at in range(0, len(names.hashes), 32)], np.bool_)

    def bring(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> None:
        self.brought.append((group, hashes, wait_s))

    def teach(self, table: SpaceTable, fingerprint: bytes, geometry: CacheGeometry) -> None:
        number = self.cache.open_namespace(Fingerprint(fingerprint), geometry) if table is self.there else 7
        table.learn(number, fingerprint, geometry)

    def settings(self, *, is_sealed: bool = True, timeout_s: float = 30.0) -> PeerStoreSettings:
        return PeerStoreSettings(
            control=self,  # type: ignore[arg-type]
            spaces=self.here,
            is_sealed=is_sealed,
            timeout_s=timeout_s,
            coder=RecordCoder(self.coding),
        )


@contextmanager
def one_peer(
    *, is_sealed: bool = True, memory_bytes: int = 64 * MIB, coding: Coding = Coding.OFF, there: Coding = Coding.OFF
) -> Iterator[OnePeer]:
    """`coding`: of the client; `there`: of the server."""
    settings = CacheSettings(memory_bytes=memory_bytes, segment_bytes=min(memory_bytes, 64 * MIB))
    with LocalCache.create(settings) as cache:
        server = PeerServer(LOOPBACK, is_sealed=is_sealed, compress=there)
        try:
            peer = OnePeer(cache, server, SpaceTable(), coding=coding)
            access = PeerAccess(
                cache,
                peer.there,
                peer,
                pidfd=os.pidfd_open(os.getpid()),
                clock=time.monotonic,
            )
            server.attach("", access)
            yield peer
        finally:
            server.close()

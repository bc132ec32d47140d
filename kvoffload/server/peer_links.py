"""A server's side towards its peers: who may open links, what they may reach, and what they have stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.cache import LocalCache, StoredBlocks
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers import PeerSpace, SpaceTable
from kvoffload.peers.loop_queue import LoopQueue, PutBlocks, RemovedBlocks, WantedBlocks
from kvoffload.peers.peer_access import PeerAccess
from kvoffload.peers.peer_server import LinkSession, PeerServer
from kvoffload.protocol import ClientMessage, Done, Error, ErrorCode, Introduce, LinkOpened, OpenLink, ServerMessage
from kvoffload.server.common.refusal import refuse
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.event_feed import EventFeed, Space
from kvoffload.server.sessions.registration import Identities
from kvoffload.server.sessions.session import Connection
from kvoffload.server.sessions.tier_requests import TierRequests
from kvoffload.server.tiering.chain import TierChain
from kvoffload.tiers import RecordNames
from kvoffload.tiers.record_coder import Coding

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PeeringPlan:
    """Where peers' links connect, and with which settings."""

    address: TcpAddress
    spaces: SpaceTable
    """Identities that the tiers of the peers' domain have learned."""
    is_sealed: bool = True
    compress: Coding = Coding.OFF
    is_known: Callable[[str], bool] = lambda _: True
    """Returns whether a name is that of a present peer."""


class PeeredCore(Protocol):
    """The core, as far as it hears what peers' links do."""

    def tell_stored(self, space: Space, stored: StoredBlocks) -> None: ...

    @property
    def tiers(self) -> TierRequests: ...

    @property
    def feed(self) -> EventFeed: ...


@dataclass(frozen=True)
class LoopLink:
    """The way from links of one domain to the event loop, as a PeerLoop."""

    domain: str
    queue: LoopQueue
    find_near: Callable[[RecordNames], npt.NDArray[np.bool_]] | None

    def tell_stored(self, space: PeerSpace, stored: StoredBlocks) -> None:
        group, hashes, parents = stored
        self.queue.send(PutBlocks(domain=self.domain, space=space, group=group, hashes=hashes, parents=parents))

    def remove(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> bool:
        removed = RemovedBlocks(domain=self.domain, space=space, group=group, hashes=hashes)
        self.queue.send(removed)
        return removed.wait(wait_s)

    def find_below(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        return np.zeros(len(names), np.bool_) if self.find_near is None else self.find_near(names)

    def bring(self, space: PeerSpace, group: int, hashes: bytes, wait_s: float) -> None:
        wanted = WantedBlocks(domain=self.domain, space=space, group=group, hashes=hashes, wait_s=wait_s)
        self.queue.send(wanted)
        wanted.wait(wait_s)


class PeerLinks:
    """Belongs to the thread of the event loop, which watches `fileno` and then calls `tell`."""

    def __init__(self, plan: PeeringPlan, *, open_pidfd: Callable[[], int], clock: Callable[[], float]) -> None:
        """Listens. ConfigError: the address cannot be used."""
        self._plan = plan
        self._open_pidfd = open_pidfd
        self._clock = clock
        self._server = PeerServer(plan.address, is_sealed=plan.is_sealed, compress=plan.compress)
        self._queue = LoopQueue()

    @property
    def port(self) -> int:
        return self._server.address.port

    @property
    def is_sealed(self) -> bool:
        return self._plan.is_sealed

    def open_session(self, peer: str, domain: str) -> LinkSession:
        return self._server.open_session(peer, domain)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when links have stored, removed or asked for something."""
        return self._queue.fileno()

    @property
    def has_untold(self) -> bool:
        """Whether `tell` has something to report."""
        return self._queue.has_more

    def attach(self, domain: str, cache: LocalCache, chain: TierChain | None = None) -> PeerAccess:
        """Connects the domain's memory and its slower tiers. Returns the access through which links work on them."""
        loop = LoopLink(domain, self._queue, None if chain is None else chain.find_near)
        access = PeerAccess(cache, self._plan.spaces, loop, pidfd=self._open_pidfd(), clock=self._clock)
        self._server.attach(domain, access)
        return access

    def tell(self, core: PeeredCore, now_ns: int) -> None:
        """Reports to the core what links have stored, removed or asked for, in its order. One call reports a bounded
        number of blocks, and `fileno` stays readable while there are more."""
        blocks, lost = self._queue.take()
        for one in blocks:
            space = Space(domain=one.domain, name_space=one.space.number, fingerprint=one.space.fingerprint)
            if isinstance(one, PutBlocks):
                core.tell_stored(space, StoredBlocks(one.group, one.hashes, one.parents))
            elif isinstance(one, RemovedBlocks):
                one.end_part(is_right=core.tiers.forget(space, one.group, one.hashes))
            elif isinstance(one, WantedBlocks):
                then = partial(one.is_done.set_result, True)
                core.tiers.bring(space, one.group, one.hashes, now_ns, wait_s=one.wait_s, then=then)
        if lost:
            core.feed.tell_lost(lost)

    def tick(self) -> None:
        """Does the links' periodic work, and closes those of servers that are no longer peers. The event loop calls
        it."""
        self._server.tick()
        self._server.keep_only(self._plan.is_known)

    def close(self) -> None:
        """Ends all links. After it they touch no slot."""
        self._queue.refuse()
        self._server.close()
        self._queue.close()


def open_peer_links(
    plan: PeeringPlan | None, *, open_pidfd: Callable[[], int], clock: Callable[[], float]
) -> PeerLinks | None:
    """Listens for links; None: the plan has none. ConfigError: the address cannot be used."""
    return None if plan is None else PeerLinks(plan, open_pidfd=open_pidfd, clock=clock)


def peer_calls(
    opener: PeerLinks | None, identities: Identities
) -> dict[type[ClientMessage], Callable[[Connection, Any], ServerMessage]]:
    """Returns the handler of each message of peers."""
    return {
        OpenLink: partial(open_link, opener=opener),
        Introduce: partial(introduce, identities=identities),
    }


def open_link(connection: Connection, message: OpenLink, *, opener: PeerLinks | None) -> LinkOpened | Error:
    """Opens a link for a client that came over TCP and is named as a peer; others are refused."""
    guest = connection.session.guest
    if opener is None or guest is None or not guest.is_peer:
        return refuse(message, ErrorCode.NOT_ALLOWED, "only a peer opens links; name its key in [[peers]]")
    if message.is_sealed != opener.is_sealed:
        mode = "sealed" if opener.is_sealed else "trusted"
        return refuse(message, ErrorCode.MISMATCH, f"links to this server are {mode}; set peer_link = {mode!r}")
    opened = opener.open_session(guest.name, guest.domain)
    return LinkOpened(port=opener.port, token=opened.token, secret=opened.secret)


def introduce(connection: Connection, message: Introduce, *, identities: Identities) -> Done | Error:
    """Registers an identity of which a peer has records."""
    guest = connection.session.guest
    domain: Domain = connection.session.domain
    if guest is None or not guest.is_peer:
        return refuse(message, ErrorCode.NOT_ALLOWED, "only a peer introduces identities")
    if domain.cache is None:
        return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
    opened = identities.open(domain, message)
    return opened if isinstance(opened, Error) else Done()

"""A server's side towards its peers: who may open links, what they may reach, and what they have stored."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvoffload.daemon.domain import Domain
from kvoffload.daemon.event_feed import Space
from kvoffload.daemon.refusal import refuse
from kvoffload.daemon.registering import open_namespace
from kvoffload.daemon.session import Connection
from kvoffload.peers import PeerSpace, SpaceBook
from kvoffload.peers.peer_desk import PeerCache, PeerDesk
from kvoffload.peers.peer_server import LinkSession, PeerServer
from kvoffload.peers.stored_mail import StoredBlocks, StoredMail
from kvoffload.protocol import ClientMessage, Done, Error, ErrorCode, Introduce, LinkOpened, OpenLink, ServerMessage
from kvoffload.tcp_address import TcpAddress

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PeeringPlan:
    """Where peers' links come in."""

    address: TcpAddress
    spaces: SpaceBook
    """What the domain's tiers have learned."""
    is_sealed: bool = True


class LinkOffice(Protocol):
    """What the core needs of it."""

    @property
    def port(self) -> int: ...

    @property
    def is_sealed(self) -> bool: ...

    def open_session(self, peer: str, domain: str) -> LinkSession: ...


class PeerOffice:
    """Belongs to the thread of the event loop, which watches `fileno` and then calls `tell`."""

    def __init__(self, plan: PeeringPlan, *, open_pidfd: Callable[[], int], clock: Callable[[], float]) -> None:
        """Listens. ConfigError: nobody can listen there."""
        self._plan = plan
        self._open_pidfd = open_pidfd
        self._clock = clock
        self._server = PeerServer(plan.address, is_sealed=plan.is_sealed)
        self._mail = StoredMail()

    @property
    def port(self) -> int:
        return self._server.address.port

    @property
    def is_sealed(self) -> bool:
        return self._plan.is_sealed

    def open_session(self, peer: str, domain: str) -> LinkSession:
        return self._server.open_session(peer, domain)

    def fileno(self) -> int:
        """Readable when links have stored something."""
        return self._mail.fileno()

    def attach(self, domain: str, cache: PeerCache) -> None:
        """The domain's memory is there."""

        def stored(space: PeerSpace, group: int, hashes: bytes, parents: bytes) -> None:
            self._mail.send(StoredBlocks(domain, space, group, hashes, parents))

        desk = PeerDesk(cache, self._plan.spaces, pidfd=self._open_pidfd(), on_stored=stored, clock=self._clock)
        self._server.attach(domain, desk)

    def tell(self, tell_stored: Callable[[Space, int, bytes, bytes], None], tell_lost: Callable[[int], None]) -> None:
        """What links have stored since the last time."""
        blocks, lost = self._mail.take()
        for domain, space, group, hashes, parents in blocks:
            told = Space(domain=domain, name_space=space.number, fingerprint=space.fingerprint)
            tell_stored(told, group, hashes, parents)
        if lost:
            tell_lost(lost)

    def tick(self) -> None:
        """To be called now and then."""
        self._server.tick()

    def close(self) -> None:
        """All links end. After it they touch no slot."""
        self._server.close()
        self._mail.close()


def open_office(
    plan: PeeringPlan | None, *, open_pidfd: Callable[[], int], clock: Callable[[], float]
) -> PeerOffice | None:
    """None: there is to be none. ConfigError: nobody can listen there."""
    return None if plan is None else PeerOffice(plan, open_pidfd=open_pidfd, clock=clock)


def peer_calls(
    office: LinkOffice | None, namespace_limit: int
) -> dict[type[ClientMessage], Callable[[Connection, Any], ServerMessage]]:
    """Who answers what peers say."""
    return {
        OpenLink: partial(open_link, office=office),
        Introduce: partial(introduce, namespace_limit=namespace_limit),
    }


def open_link(connection: Connection, message: OpenLink, *, office: LinkOffice | None) -> LinkOpened | Error:
    """Only for whoever came over TCP and is named as a peer."""
    guest = connection.session.guest
    if office is None or guest is None or not guest.is_peer:
        return refuse(message, ErrorCode.NOT_ALLOWED, "only a peer opens links; name its key in [[peers]]")
    if message.is_sealed != office.is_sealed:
        mode = "sealed" if office.is_sealed else "trusted"
        return refuse(message, ErrorCode.MISMATCH, f"links to this server are {mode}; set peer_link = {mode!r}")
    opened = office.open_session(guest.name, guest.domain)
    return LinkOpened(port=office.port, token=opened.token, secret=opened.secret)


def introduce(connection: Connection, message: Introduce, *, namespace_limit: int) -> Done | Error:
    """An identity of which a peer has records."""
    guest = connection.session.guest
    domain: Domain = connection.session.domain
    if guest is None or not guest.is_peer:
        return refuse(message, ErrorCode.NOT_ALLOWED, "only a peer introduces identities")
    if domain.cache is None:
        return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
    opened = open_namespace(domain, message, namespace_limit)
    return opened if isinstance(opened, Error) else Done()

"""A server's core with engines at it: no sockets, no processes, no clock. Every message passes the codec both ways."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from random import Random
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from kvoffload.cache import (
    NO_LIMIT,
    CacheGeometry,
    CacheSettings,
    LocalCache,
    SessionId,
)
from kvoffload.client.settings import describe_blocks
from kvoffload.protocol import (
    CAPABILITIES,
    CODEC,
    Call,
    Channel,
    ClientMessage,
    Error,
    ErrorCode,
    Greeting,
    HandshakeSettings,
    Hello,
    Quarantine,
    Register,
    Registered,
    Role,
    ServerMessage,
    Welcome,
)
from kvoffload.protocol.message import OneWay
from kvoffload.server import (
    CoreSettings,
    DomainSettings,
    Peer,
    SendMemory,
    ServerCore,
    ServerLimits,
    ToConnection,
    ToLifeline,
)
from kvoffload.server.channels.express_channels import ExpressChannels
from kvoffload.server.peer_links import PeerLinks
from kvoffload.server.sessions.outbox import Later, OpenExpress, Sendable
from kvoffload.server.tiering.traffic import TierTraffic
from tests.kit.cache.cache_model import HYBRID, SMALL, fingerprint
from tests.kit.server.express_peer import ExpressPeer

BOOT_ID = 0xB007
UID = 1000


class CacheWithoutProcesses(LocalCache):
    """Pidfds are numbers, and a test says which of them have exited.

    The native core ends a quarantined session that has no processes; so here it hears of a quarantine at the end only.
    """

    def __init__(self, core: Any) -> None:
        super().__init__(core)
        self.exited: set[int] = set()
        self.members: dict[SessionId, set[int]] = {}
        self.quarantined: set[SessionId] = set()

    def open_session(self, *, held_limit_bytes: int = NO_LIMIT, owner: int | None = None) -> SessionId:
        session = super().open_session(held_limit_bytes=held_limit_bytes, owner=owner)
        self.members[session] = set()
        return session

    def add_process(self, session: SessionId, *, pid: int | None = None, pidfd: int | None = None) -> None:
        assert session not in self.quarantined
        assert pid is None
        if pidfd is None or pidfd < 0:
            raise ValueError("the descriptor received for a process is not a pidfd")
        self.members[session].add(pidfd)

    def quarantine_session(self, session: SessionId) -> bool:
        self.quarantined |= {session} & self.members.keys()
        return session in self.members

    def reopen_session(self, session: SessionId, *, owner: int | None = None) -> bool:
        if session not in self.members or self._is_ending(session):
            return False
        self.quarantined.discard(session)
        self.members[session] -= self.exited
        return True

    def reclaim_ended(self) -> int:
        ended = [session for session in self.members if self._is_ending(session)]
        for session in ended:
            del self.members[session]
            self.quarantined.discard(session)
            super().quarantine_session(session)
        assert super().reclaim_ended() == len(ended)
        return len(ended)

    def _is_ending(self, session: SessionId) -> bool:
        members = self.members[session]
        return members <= self.exited and (bool(members) or session in self.quarantined)


@dataclass
class FakePidfd:
    """A descriptor that has one owner at every moment."""

    number: int
    is_taken: bool = False
    is_closed: bool = False

    def take(self) -> int:
        assert not self.is_taken
        assert not self.is_closed
        self.is_taken = True
        return self.number

    def close(self) -> None:
        self.is_closed = self.is_closed or not self.is_taken


def core_settings(**changes: Any) -> CoreSettings:
    """Returns the settings of a server that has everything."""
    settings = CoreSettings(
        boot_id=BOOT_ID,
        handshake=HandshakeSettings(capabilities=CAPABILITIES, domain="", software="test"),
        control="ipc://control",
        pid=1,
        uid=0,
    )
    return replace(settings, **changes)


def register_of(geometry: CacheGeometry = HYBRID, name: str = "model", **changes: Any) -> Register:
    """Returns what an engine with this geometry says."""
    return replace(describe_blocks(fingerprint(name), geometry, hash_algorithm="sha256"), **changes)


class Server:
    """The core, with what lies around it played by the test."""

    def __init__(
        self,
        *,
        settings: CoreSettings | None = None,
        domains: Sequence[DomainSettings] = (DomainSettings(name="main"),),
        memory: CacheSettings | None = SMALL,
        limits: ServerLimits | None = None,
        tiers: Mapping[str, TierTraffic] | None = None,
        links: PeerLinks | None = None,
        express: ExpressChannels | None = None,
    ) -> None:
        settings = settings or core_settings()
        if limits is not None:
            settings = replace(settings, limits=limits)
        self.settings = settings
        self.express = ExpressChannels(boot_id=BOOT_ID)
        self.express.watch_stored(bool(tiers))
        self.core = ServerCore(
            settings,
            domains,
            draw=_draw(),
            on_heard=lambda is_wanted: self.express.watch_stored(is_wanted or bool(tiers)),
            tiers=tiers or {},
            links=links,
            express=express,
        )
        self.caches: dict[str, CacheWithoutProcesses] = {}
        self._cores: dict[str, Any] = {}
        self.told: dict[int, list[ServerMessage]] = {}
        """Events by lifeline."""
        self.memory_sent: list[SendMemory] = []
        self.opened: list[OpenExpress] = []
        """Express channels that were offered. A client opens its own when it first needs it."""
        self.now_ns = 1_000
        self.numbers = count(1)
        for domain in domains if memory is not None else ():
            self.attach(domain.name, CacheWithoutProcesses.create(memory or SMALL))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.express.close()
        for cache in self.caches.values():
            cache.close()

    @property
    def cache(self) -> CacheWithoutProcesses:
        return next(iter(self.caches.values()))

    def attach(self, domain: str, cache: LocalCache, *, adopted_boot_id: int = 0) -> None:
        if isinstance(cache, CacheWithoutProcesses):
            self.caches[domain] = cache
        if isinstance(cache, LocalCache):
            self._cores[domain] = cache.core
        self.deliver(self.core.attach_memory(domain, cache, adopted_boot_id=adopted_boot_id))

    def deliver(self, sent: list[Sendable], *, lifeline: int = 0, key: bytes = b"") -> ServerMessage | None:
        """Keeps what others are told; the answer to the one who asked."""
        answer: ServerMessage | None = None
        if self.core.is_draining:
            self.express.start_drain()
        for item in sent:
            match item:
                case SendMemory():
                    self.memory_sent.append(item)
                case OpenExpress():
                    self.opened.append(item)
                case ToLifeline(to, message, 0):
                    if isinstance(message, Quarantine):
                        self.express.end(to)
                    self.told.setdefault(to, []).append(_cross(message, 1, Channel.LIFELINE))
                case ToLifeline(to, message, number):
                    assert to == lifeline
                    assert answer is None
                    answer = _cross(message, number, Channel.LIFELINE)
                case ToConnection(connection, message, number):
                    assert connection == key
                    assert answer is None
                    answer = _cross(message, number, Channel.CONTROL)
                case Later():
                    assert answer is None
                    answer = self.deliver(self.core.finish(item, item.find_all), key=key)
        return answer

    def open_express(self, lifeline: int) -> ExpressPeer:
        """The end of the process whose lifeline this is."""
        (wanted,) = [one for one in self.opened if one.lifeline == lifeline]
        end = self.express.open(wanted, self._cores[wanted.space.domain])
        assert end is not None
        return ExpressPeer(end, session=wanted.session)

    def hear_stored(self) -> None:
        """Does what the loop does when something was stored."""
        self.hear_some()
        while self.express.has_untold:
            self.hear_some()

    def hear_some(self) -> None:
        """Does what one turn of the loop does of it."""
        self.express.take_stored(self.core.tell_stored, self.core.tiers.forget, self.core.feed.tell_lost)

    def greet(self, greeting: Greeting, *, lifeline: int, peer: Peer, pidfd: FakePidfd | None) -> ServerMessage | None:
        call = _cross_call(greeting, number=1, channel=Channel.LIFELINE)
        sent = self.core.greet(lifeline, call, peer, pidfd, self.now_ns)
        return self.deliver(sent, lifeline=lifeline)

    def process(self, engine: str = "engine", **options: Any) -> Client:
        return Client(self, engine, **options)

    def exit_process(self, *clients: Client) -> None:
        """Their lifelines end, their pidfds report."""
        for client in clients:
            for cache in self.caches.values():
                cache.exited.add(client.pidfd.number)
            self.close_lifeline(client.lifeline)
        self.core.tick()

    def close_lifeline(self, lifeline: int) -> None:
        """The process has closed it, and its express channel ends."""
        self.express.end(lifeline)
        self.core.close_lifeline(lifeline)


@dataclass
class Client:
    """One process of an engine, or an observer."""

    server: Server
    engine: str
    uid: int = UID
    role: Role = Role.SCHEDULER
    domain: str = ""
    wants_express: bool = True
    session: int = 0
    name_space: int = -1
    number: int = 0
    one_way: int = 0
    expires_ns: int = 0
    lifeline: int = field(init=False)
    key: bytes = field(init=False)
    pidfd: FakePidfd = field(init=False)
    _express: tuple[int, ExpressPeer] | None = None
    """The express channel, with the lifeline over which it came."""

    def __post_init__(self) -> None:
        self.lifeline = next(self.server.numbers)
        self.pidfd = FakePidfd(self.lifeline)
        self.key = b"connection %d" % next(self.server.numbers)

    def greet(self, *, former_session: int = 0, former_boot_id: int = 0, is_new: bool = True) -> ServerMessage | None:
        """On a new lifeline, but with the pidfd of the same process."""
        if is_new:
            self.lifeline = next(self.server.numbers)
        self.pidfd = FakePidfd(self.pidfd.number)
        greeting = Greeting(
            protocol_min=1,
            protocol_max=1,
            engine=self.engine,
            role=self.role,
            domain=self.domain,
            former_session=former_session,
            former_boot_id=former_boot_id,
            wants_express=self.wants_express,
        )
        peer = Peer(pid=self.lifeline, uid=self.uid)
        pidfd = None if self.role is Role.OBSERVER else self.pidfd
        answer = self.server.greet(greeting, lifeline=self.lifeline, peer=peer, pidfd=pidfd)
        if isinstance(answer, Welcome):
            self.session = answer.session
        return answer

    def connect(self, **hello: Any) -> ServerMessage | None:
        """Hello on a new control connection."""
        self.key = b"connection %d" % next(self.server.numbers)
        self.number = self.one_way = 0
        options: dict[str, Any] = {"protocol_min": 1, "protocol_max": 1, "capabilities": tuple(sorted(CAPABILITIES))}
        return self.ask(Hello(**(options | hello)))

    def join(self, geometry: CacheGeometry = HYBRID, name: str = "model", **changes: Any) -> Self:
        """Goes through the whole opening."""
        assert isinstance(self.greet(), Welcome)
        self.connect()
        answer = self.ask(register_of(geometry, name, **changes))
        assert isinstance(answer, Registered), answer
        self.name_space = answer.name_space
        return self

    def watch(self) -> Self:
        """The opening of an observer."""
        self.role = Role.OBSERVER
        assert isinstance(self.greet(), Welcome)
        self.connect()
        return self

    def ask(self, message: ClientMessage, *, session: int | None = None) -> Any:
        """The answer to a request; None: it was dropped. What is said of blocks goes by the express channel."""
        if Channel.CONTROL not in message.channels:
            return self.express.ask(message, expires_ns=self.expires_ns)
        self.number += 1
        return self._send(message, self.number, session)

    @property
    def express(self) -> ExpressPeer:
        if self._express is None or self._express[0] != self.lifeline:
            self._express = self.lifeline, self.server.open_express(self.lifeline)
        return self._express[1]

    def tell(self, message: OneWay, *, number: int | None = None) -> Any:
        """A one-way message, with the next number unless told otherwise; the error that answers it, or None."""
        if Channel.CONTROL not in message.channels:
            self.express.tell(message, number=number, expires_ns=self.expires_ns)
            error = self.express.confirm()
            self.server.hear_stored()
            return error
        if number is None:
            self.one_way += 1
            number = self.one_way
        return self._send(message, number, None)

    def lose(self) -> None:
        """A one-way message that never comes."""
        self.one_way += 1

    def _send(self, message: ClientMessage, number: int, session: int | None) -> ServerMessage | None:
        named = self.session if session is None else session
        call = _cross_call(message, number=number, session=named, expires_ns=self.expires_ns)
        return self.server.deliver(self.server.core.handle(self.key, call, self.server.now_ns), key=self.key)


def greeted(server: Server, name: str, **options: Any) -> Client:
    """A process that the server has welcomed, with a connection."""
    process = server.process(name, **options)
    process.greet()
    process.connect()
    return process


def numbers(blob: bytes) -> npt.NDArray[np.uint64]:
    """Returns the numbers of a little-endian blob."""
    return np.frombuffer(blob, "<u8")


def code_of(answer: object) -> ErrorCode:
    """Returns the code of what must be an error."""
    assert isinstance(answer, Error), answer
    return answer.code


def _draw() -> Any:
    random = Random(1)
    return lambda: random.getrandbits(32)


def _cross_call(message: ClientMessage, *, channel: Channel = Channel.CONTROL, **head: int) -> Call:
    call = CODEC.decode_call(CODEC.encode_call(message, channel=channel, **head), channel=channel)  # type: ignore
    assert isinstance(call, Call)
    return call


def _cross(message: ServerMessage, number: int, channel: Channel) -> ServerMessage:
    frame = CODEC.encode_answer(message, number=number, boot_id=BOOT_ID, channel=channel)
    answer = CODEC.decode_answer(frame, channel=channel)
    assert answer.message == message  # type: ignore[union-attr]
    return message

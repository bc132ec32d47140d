"""Bytes as everything that peers may do to a server's core: frames on connections, greetings, ends, ticks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvoffload.protocol import (
    CODEC,
    MESSAGES,
    Call,
    Channel,
    ClientMessage,
    Error,
    ErrorCode,
    Greeting,
    Hello,
    ProtocolFault,
)
from kvoffload.protocol.shape import Shape
from kvoffload.server import DomainSettings, Guest, Peer, ServerLimits
from kvoffload.server.sessions.outbox import Sendable, ToConnection
from tests.kit.protocol.examples import make_example
from tests.kit.server.harness import FakePidfd, Server, core_settings, register_of

LIMITS = ServerLimits(sessions=8, session_processes=3, session_connections=3, guests=2, namespaces=4, subscribers=2)
MOST_STEPS = 32
_HELLO = Hello(protocol_min=1, protocol_max=1, capabilities=("adopt", "events", "prefetch"))


def serve_all(data: bytes) -> None:
    """Each step: what it is, who does it, how long its frame is, the frame. Nothing may raise, be INTERNAL or grow."""
    domains = [DomainSettings(name="main"), DomainSettings(name="other", uids=frozenset({7}))]
    with Server(settings=replace(core_settings(), limits=LIMITS), domains=domains) as server:
        engine = server.process().join()
        connections = [engine.key, b"another", b"third"]
        for kind, who, frame in _read_steps(data):
            session = (engine.session, 0, 1)[who % 3]
            _act(server, kind, connections[who % 3], session, frame)
            assert len(server.core.sessions) <= LIMITS.sessions
        for key in server.core.feed.ready():
            server.core.feed.take(key, 1000)
        server.core.tick()


def make_seeds() -> Iterator[bytes]:
    """Makes seeds of every message, alone and behind a hello."""
    hello = CODEC.encode_call(_HELLO, number=1)
    register = CODEC.encode_call(register_of(), number=1)
    for kind in MESSAGES:
        if not issubclass(kind, ClientMessage):
            continue
        channel = kind.channels[0]
        frame = CODEC.encode_call(make_example(Shape(kind), version=1), number=1, channel=channel)
        step = 3 if channel is Channel.LIFELINE else 0
        yield _write_step(step, 0, frame)
        yield _write_step(1, 1, hello) + _write_step(1, 1, frame)
        yield _write_step(0, 0, hello) + _write_step(0, 0, register) + _write_step(step, 0, frame)


def _read_steps(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    at = 0
    for _ in range(MOST_STEPS):
        if at + 4 > len(data):
            return
        size = int.from_bytes(data[at + 2 : at + 4], "little")
        yield data[at], data[at + 1], data[at + 4 : at + 4 + size]
        at += 4 + size


def _write_step(kind: int, who: int, frame: bytes) -> bytes:
    return bytes([kind, who]) + len(frame).to_bytes(2, "little") + frame


def _act(server: Server, kind: int, key: bytes, session: int, frame: bytes) -> None:
    core = server.core
    match kind % 6:
        case 0 | 1:
            call = CODEC.decode_call(frame)
            if isinstance(call, ProtocolFault):
                _check(core.handle_fault(key, call))
            elif kind % 6 == 0:
                _check(core.handle(key, call._replace(session=session), server.now_ns))
            else:
                guest = Guest(domain="main", is_operator=bool(session))
                _check(core.handle_guest(b"tcp" + key, call, guest, server.now_ns))
        case 2:
            call = CODEC.decode_call(frame)
            if isinstance(call, Call):
                _check(core.overflow(key, call))
        case 3:
            greeting = CODEC.decode_call(frame, channel=Channel.LIFELINE)
            if isinstance(greeting, Call) and isinstance(greeting.message, Greeting):
                lifeline = next(server.numbers)
                pidfd = FakePidfd(lifeline)
                _check(core.greet(lifeline, greeting, Peer(pid=1, uid=len(frame) % 8), pidfd, server.now_ns))
                assert pidfd.is_taken or pidfd.is_closed or core.sessions.find_lifeline(lifeline) is not None
        case 4:
            core.close_lifeline(len(frame))
            core.close_connection(key)
        case _:
            server.now_ns += 1 + len(frame)
            core.tick()


def _check(sent: list[Sendable]) -> None:
    for one in sent:
        if isinstance(one, ToConnection):
            answer: Any = one.message
            assert not (isinstance(answer, Error) and answer.code is ErrorCode.INTERNAL), answer
            CODEC.encode_answer(answer, number=one.number, boot_id=1)

"""A link between servers: its hellos, requests and answers, at a server with memory, and at a client with slots."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from functools import cache

import numpy as np

from kvoffload import native
from kvoffload.cache import CacheSettings, LocalCache
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.peers import link_hello, peer_server
from kvoffload.peers.control_link import LinkTicket
from kvoffload.peers.link_hello import HelloVerdict, LinkHello
from kvoffload.peers.peer_access import PeerAccess
from kvoffload.peers.peer_store import PeerStore
from kvoffload.peers.requests import (
    ANSWER_BYTES,
    CODE,
    HEAD_BYTES,
    BadRequestError,
    LinkAnswer,
    LinkRequest,
    LinkStatus,
    LinkVerb,
    answer_only,
    pack_code,
    read_answer,
    read_answer_head,
    read_head,
)
from kvoffload.peers.space_table import PeerSpace, SpaceTable
from kvoffload.tiers.base import RecordBatch, RecordNames, RecordOutcome
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.units import MIB
from tests.fuzz.parts import Input, check_line
from tests.kit.peers.one_peer import OnePeer, same_groups

_RECORD_BYTES = 1000
_FINGERPRINT = b"f" * 32
_NAMES = RecordNames(fingerprint=_FINGERPRINT, hashes=b"h" * 32 + b"i" * 32, group=1, shard=0)
_RECORDS = np.zeros(2 * _RECORD_BYTES, np.uint8)
_SLOTS = np.uint64(_RECORDS.ctypes.data) + np.arange(2, dtype=np.uint64) * np.uint64(_RECORD_BYTES)
_SENT_LIMIT = 100_000
"""Most bytes sent, which fit into a socket that is not read."""
_WAYS = 8


class _Peer(OnePeer):
    """A peer that takes any announcement, and whose ticket opens nothing."""

    def find_ticket(self, *, is_sealed: bool) -> LinkTicket:
        return LinkTicket(TcpAddress("127.0.0.1", 0), b"t" * 16, b"s" * 32)

    def introduce(self, space: PeerSpace) -> bool:
        return True


@cache
def _access() -> PeerAccess:
    """Access to memory that all inputs of this process share."""
    memory = LocalCache.create(CacheSettings(memory_bytes=4 * MIB, segment_bytes=4 * MIB))
    peer = OnePeer(memory, None, SpaceTable())  # type: ignore[arg-type]
    peer.teach(peer.there, _FINGERPRINT, same_groups(_RECORD_BYTES))
    return PeerAccess(memory, peer.there, peer, pidfd=os.pidfd_open(os.getpid()), clock=lambda: 0.0)


def make_seeds() -> Iterator[bytes]:
    yield b"\0" + LinkHello(token=b"t" * 16, nonce=b"n" * 16, is_sealed=True).pack()
    yield b"\1" + link_hello.HelloAnswer(verdict=HelloVerdict.WELCOME, nonce=b"n" * 16, proof=b"p" * 32).pack()
    digests = np.array([5, 6], np.uint64).tobytes()
    requests = {
        verb: LinkRequest(
            verb=verb,
            names=_NAMES,
            record_bytes=_RECORD_BYTES,
            wait_ms=10,
            digests=digests if verb is LinkVerb.PUT else b"",
            parents=bytes(64) if verb is LinkVerb.PUT else b"",
        ).pack()
        for verb in LinkVerb
        if verb is not LinkVerb.COUNT
    }
    for request in requests.values():
        yield b"\2" + request
    count = LinkRequest(verb=LinkVerb.COUNT, names=RecordNames(fingerprint=bytes(32), hashes=b"")).pack()
    yield b"\2" + count + requests[LinkVerb.PUT] + bytes(2 * _RECORD_BYTES) + requests[LinkVerb.GET]
    outcomes = np.array([RecordOutcome.FOUND, RecordOutcome.MISSING], np.uint8)
    answer = LinkAnswer(outcomes=outcomes, digests=np.array([7, 0], np.uint64)).pack()
    wanted = LinkAnswer(outcomes=np.zeros(2, np.uint8), digests=np.zeros(2, np.uint64)).pack()
    yield b"\3" + answer + bytes(_RECORD_BYTES)
    coded = LinkAnswer(outcomes=outcomes, digests=np.array([7, 0], np.uint64), code=CODE).pack()
    for length in (0, 40, _RECORD_BYTES):
        yield b"\3" + coded + length.to_bytes(4, "little") + bytes(length or _RECORD_BYTES)
    put = LinkRequest(
        verb=LinkVerb.PUT, names=_NAMES, record_bytes=_RECORD_BYTES, digests=digests, parents=bytes(64), code=CODE
    )
    for code in (0, CODE, CODE + 1):
        yield b"\2" + put.pack() + pack_code(code) + (40).to_bytes(4, "little") + bytes(2 * _RECORD_BYTES)
    yield b"\4" + LinkAnswer(outcomes=np.zeros(2, np.uint8), digests=np.zeros(2, np.uint64), code=CODE).pack() + answer
    yield b"\4" + wanted + answer
    yield b"\5" + answer
    yield b"\6" + answer
    yield b"\7" + answer
    yield b"\3" + answer_only(LinkStatus.CLOSING).pack()


def run(data: bytes) -> None:
    given = Input(data)
    way = given.number() % _WAYS
    if way < 2:
        _read_hello(given, way)
    elif way == 2:
        _serve(given.rest())
    else:
        _ask(given.rest(), way)


def _read_hello(given: Input, way: int) -> None:
    size, read = (
        (link_hello.HELLO_BYTES, link_hello.read_hello),
        (link_hello.HELLO_ANSWER_BYTES, link_hello.read_hello_answer),
    )[way]
    with contextlib.suppress(ValueError):
        read(given.take(size).ljust(size, b"\0"))
    with contextlib.suppress(BadRequestError):
        head = read_head(given.take(HEAD_BYTES).ljust(HEAD_BYTES, b"\0"))
        assert len(head.read_rest(bytes(head.rest_bytes)).names) == head.count
    with contextlib.suppress(BadRequestError):
        answer = read_answer_head(given.take(ANSWER_BYTES).ljust(ANSWER_BYTES, b"\0"), 2, code=CODE)
        assert answer.rest_bytes in (0, 18)
        read_answer(answer, given.take(answer.rest_bytes).ljust(answer.rest_bytes, b"\0"))


def _serve(said: bytes) -> None:
    """A link that is a peer's. Whatever ends it, nothing stays held."""
    ours, theirs = _connect(said)
    access = _access()
    with ours, theirs:
        link = native.RecordLink(os.dup(ours.fileno()), None)
        try:
            peer_server.serve_requests(ours, link, access, RecordCoder(Coding.ON))
        except (OSError, ValueError) as fault:
            check_line(fault)
    stats = access.cache.stats
    assert (stats.leases, stats.reserved) == (0, 0)


def _ask(said: bytes, way: int) -> None:
    """A client whose peer answers so."""
    ours, theirs = _connect(said)
    peer = _Peer(None, None, SpaceTable(), coding=Coding.ON)  # type: ignore[arg-type]
    peer.here.learn(7, _FINGERPRINT, same_groups(_RECORD_BYTES))
    link = native.RecordLink(os.dup(ours.fileno()), None)
    store = PeerStore(peer.settings(), lambda ticket, settings: (ours, link))
    keys = [bytes(32) + bytes(8) + bytes((at,)) * 32 for at in range(2)]
    with ours, theirs:
        try:
            match way:
                case 3:
                    found = store.get_slots(_NAMES, _SLOTS, record_bytes=_RECORD_BYTES)
                    assert len(found.outcomes) == 2
                case 4:
                    digests = np.array([5, 6], np.uint64)
                    batch = RecordBatch(_NAMES, _SLOTS, record_bytes=_RECORD_BYTES, digests=digests)
                    outcomes = store.put_slots(batch)
                    assert len(outcomes) == 2
                case 5:
                    assert len(store.look(keys)) == 2
                case 6:
                    assert len(store.remove(keys)) == 2
                case _:
                    facts = store.probe()
                    assert facts.capacity_bytes >= 0
        except StoreFaultError as fault:
            check_line(fault)


def _connect(said: bytes) -> tuple[socket.socket, socket.socket]:
    """One end of a link, whose other end has said that, and nothing more."""
    ours, theirs = socket.socketpair()
    theirs.sendall(said[:_SENT_LIMIT])
    theirs.shutdown(socket.SHUT_WR)
    return ours, theirs

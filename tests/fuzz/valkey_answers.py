"""Any answers of a Valkey server, cut anywhere: to a tier that looks, reads, writes, lists and asks how full it is,
and to a fleet's registry."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import numpy as np

from kvoffload import native
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.peers.announcement import Announcement
from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.fleet_registry import FleetRegistry, RegistrySettings
from kvoffload.tiers.base import RecordBatch, RecordNames
from kvoffload.tiers.envelope import RecordHead, digest_of, list_names
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import RespConnection
from kvoffload.tiers.valkey import ValkeySettings, ValkeyStore
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyNodes
from kvoffload.types import HASH_BYTES
from tests.fuzz.parts import Input, check_line

_RECORD_BYTES = 400
"""Enough for a record that is coded."""
_SETTINGS = ValkeySettings(address=ValkeyAddress(host="a"), call_timeout_s=1e6)
_NAMES = RecordNames(fingerprint=b"f" * 32, hashes=b"h" * HASH_BYTES + b"i" * HASH_BYTES, group=1, shard=0)
_RECORDS = np.zeros(2 * _RECORD_BYTES, np.uint8)
_SLOTS = np.uint64(_RECORDS.ctypes.data) + np.arange(2, dtype=np.uint64) * np.uint64(_RECORD_BYTES)
_OWN = FleetMember(address=TcpAddress("127.0.0.1", 5000), key="k" * 40)
_REGISTRY = RegistrySettings(valkey=_SETTINGS, fleet="blue", secret=b"what only the fleet knows")
_CALLS = 7
_SAID_LIMIT = 100 << 10
"""Most bytes said, which fit into a socket that is not read."""


class _Connected:
    """A socket whose other end has said it all, and listens to nothing. All connections share what is said."""

    def __init__(self, said: bytes, piece_bytes: int) -> None:
        self._end, other = socket.socketpair()
        self._piece_bytes = piece_bytes
        with other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
            other.sendall(said[:_SAID_LIMIT])

    def recv_into(self, room: memoryview, _: int, flags: int) -> int:
        size = len(room) if flags & socket.MSG_WAITALL else min(len(room), self._piece_bytes)
        return self._end.recv_into(room, size, flags)

    def fileno(self) -> int:
        return self._end.fileno()

    def sendmsg(self, parts: Sequence[memoryview]) -> int:
        return sum(map(len, parts))

    def setsockopt(self, *_: object) -> None: ...
    def settimeout(self, _: object) -> None: ...
    def close(self) -> None: ...

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Lasts as long as the connections."""
        with self._end:
            yield


def make_seeds() -> Iterator[bytes]:
    alone = b"$17\r\ncluster_enabled:0\r\n"
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$1\r\nb\r\n:7\r\n$2\r\nid\r\n"
    cluster = b"$17\r\ncluster_enabled:1\r\n" + slots
    name = next(list_names(_NAMES))
    data = bytes(_RECORD_BYTES)
    value = RecordHead(name, len(data), digest_of(memoryview(data), name), b"p" * 32).pack() + data
    record = b"$%d\r\n%b\r\n" % (len(value), value)
    short = native.RecordEncoder().encode(data)
    assert short is not None
    head = RecordHead(name, len(data), digest_of(memoryview(data), name), b"p" * 32, len(short)).pack()
    coded = b"$%d\r\n%b\r\n" % (len(head) + len(short), head + short)
    answers = [
        record + coded,
        b":1\r\n:0\r\n",
        b":0\r\n:0\r\n+OK\r\n-OOM no room\r\n",
        b":1\r\n-MOVED 3 b:7\r\n" + slots + b":1\r\n",
        b"*2\r\n$1\r\n5\r\n*1\r\n$3\r\nkey\r\n" + record,
        b":1\r\n$-1\r\n:0\r\n:0\r\n:0\r\n:0\r\n$-1\r\n$30\r\nused_memory:5\r\nmaxmemory:100\r\n\r\n:3\r\n",
    ]
    announcement = Announcement(member=_OWN, at_ms=5_000, order=1).sign(_REGISTRY.fleet, _REGISTRY.secret)
    written = b"$%d\r\n%b\r\n" % (len(_OWN.name), _OWN.name.encode()) + b"$%d\r\n%b\r\n" % (
        len(announcement),
        announcement,
    )
    answers.append(b"*2\r\n$1\r\n5\r\n$1\r\n0\r\n:1\r\n*2\r\n$1\r\n0\r\n*2\r\n" + written)
    for call, answer in enumerate(answers):
        for first in (alone, cluster):
            yield bytes((call, 64)) + first + answer
            yield bytes((call, 2)) + first + answer
    yield (
        bytes((len(answers), 9))
        + b"+OK\r\n:-7\r\n$5\r\na\r\nbc\r\n$-1\r\n-ERR no\r\n*2\r\n:1\r\n*1\r\n$0\r\n\r\n*-1\r\n"
    )


def run(data: bytes) -> None:
    given = Input(data)
    call, piece_bytes = given.number() % (_CALLS + 1), max(given.number(), 1)
    said = _Connected(given.rest(), piece_bytes)

    def connect(address: tuple[str, int], _: float) -> _Connected:
        """Refuses a malformed address as the real call does."""
        host, port = address
        if "\0" in host or not host.encode("idna"):
            raise ValueError("no host")
        if not 0 <= port < 1 << 16:
            raise OverflowError("port must be 0-65535")
        return said

    with patch("kvoffload.tiers.resp_connection.socket.create_connection", connect), said.shared():
        try:
            _ask(call)
        except StoreFaultError as fault:
            check_line(fault)


def _ask(call: int) -> None:
    if call == _CALLS:
        _listen(RespConnection("a", 1, timeout_s=1e6))
        return
    if call == _CALLS - 1:
        registry = FleetRegistry(_REGISTRY, _OWN, lambda _: None)
        for _ in range(2):
            registry.look(ValkeyNodes(_SETTINGS, ClusterView()), is_last=False)
        return
    store = ValkeyStore(_SETTINGS, ClusterView(), RecordCoder(Coding.ON))
    keys = [name.key for name in list_names(_NAMES)]
    match call:
        case 0:
            found = store.get_slots(_NAMES, _SLOTS, record_bytes=_RECORD_BYTES)
            assert len(found.outcomes) == len(found.digests) == len(keys)
        case 1:
            assert len(store.remove(keys)) == len(keys)
        case 2:
            names = list(list_names(_NAMES))
            digests = [digest_of(memoryview(_RECORDS[:_RECORD_BYTES].tobytes()), name) for name in names]
            sums = np.array(digests, np.uint64)
            store.put_slots(RecordBatch(_NAMES, _SLOTS, record_bytes=_RECORD_BYTES, digests=sums))
        case 3:
            assert len(store.look(keys)) == len(keys)
        case 4:
            cursor, heads = store.scan(0, 100)
            assert cursor >= 0
            assert all(heads)
        case _:
            facts = store.probe()
            assert min(facts.capacity_bytes, facts.used_bytes, facts.values) >= 0


def _listen(connection: RespConnection) -> None:
    """To answers of any kind, until there are no more."""
    for _ in range(100):
        connection.read_answer()
        connection.read_lines(1)
        size = connection.read_size()
        if isinstance(size, int):
            assert len(connection.read_beginning(size, 10)) <= 10

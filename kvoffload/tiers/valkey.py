"""Valkey, or Redis, as a record store: one server or a cluster, which says itself what it is.

Records are values of their own, with a time to live where one is set; what the server evicts when it is full is its own
policy's business.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np
import numpy.typing as npt

from kvoffload.config.valkey_address import parse_valkey_address
from kvoffload.key_files import read_private_text
from kvoffload.tiers.base import Addresses, RecordBatch, RecordNames, RecordOutcome
from kvoffload.tiers.envelope import (
    HEAD_BYTES,
    KEY_BYTES,
    CameRecords,
    OpenValue,
    RecordHead,
    RecordName,
    Verdict,
    check_record,
    digest_slots,
    list_keys,
    most_value_bytes,
    open_value,
    pack_heads,
    pack_value,
    read_key,
)
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import FoundRecords, Key, SlotStore, StoreFacts, StoreFaultError, Value, view_slot
from kvoffload.tiers.remote import RemotePlace, RemoteTier, RemoteTierSettings
from kvoffload.tiers.resp_connection import ErrorAnswer, RespConnection, pack_command, read_count, read_error
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyAccess, ValkeyNodes, as_bytes, check_answer
from kvoffload.tiers.valkey_slots import NODE_LIMIT
from kvoffload.types import HASH_BYTES

if TYPE_CHECKING:
    from kvoffload.config.settings import Settings

PREFIX = b"kvoffload:1:"
"""Prefix of every key; the number is that of the envelope's layout."""
_PROBED = PREFIX + b"probe"
"""A key that is never written."""
_SCANNED = 256
_SENT_BYTES = 2 << 20
"""Smaller values are verified and leave together, as each call that has to wait costs more than caches lose by it."""
_AHEAD_BYTES = 2 << 20
"""Bytes asked for before they are read: the server copies what it sends, best while that is in its caches."""
_MOVED_BYTES = 256 << 10
"""Records of up to so many bytes are read many at a time. It costs less to wait in the kernel until all of a larger one
is there."""
_READ_AT_ONCE = 256
"""The most records that are read at a time, however small they are."""
_ELSEWHERE = ("MOVED", "ASK", "TRYAGAIN")
_OTHER_TYPE = "WRONGTYPE"
"""The key has no value of bytes: another writer made it, and it is removed like a damaged record."""


@dataclass(frozen=True, kw_only=True)
class ValkeySettings(ValkeyAccess, RemotePlace):
    """The settings with which a tier reaches a server."""

    connections: int = 4
    ttl_s: int = 0
    """0: records stay until the server evicts them."""
    compress: Coding = Coding.OFF

    @classmethod
    def from_settings(cls, settings: Settings, where: str) -> Self:
        """Makes the settings for the server at this address. ConfigError: a file cannot be read."""
        password = read_private_text(Path(settings.valkey_password_file)) if settings.valkey_password_file else ""
        return cls(
            address=parse_valkey_address(where),
            password=password.strip(),
            ca_file=settings.valkey_ca_file,
            cert_file=settings.valkey_cert_file,
            key_file=settings.valkey_key_file,
            call_timeout_s=settings.remote_timeout,
            connections=settings.remote_connections,
            ttl_s=round(settings.valkey_ttl),
            compress=Coding(settings.remote_compress),
        )

    def describe(self) -> str:
        """Describes the server in a few words."""
        return str(self.address)

    def open_tier(self) -> RemoteTier:
        """Opens the tier and starts its threads; the server need not be there."""
        coder = RecordCoder(self.compress)
        return RemoteTier(
            RemoteTierSettings(
                place=str(self.address),
                open_store=self.make_opener(coder),
                connections=self.connections,
                coder=coder,
            )
        )

    def find_remedy(self, reason: str) -> str:
        host, port = self.address.host, self.address.port
        is_absent = "refused" in reason.lower()
        return f"on {host}: valkey-server --port {port}" if is_absent else f"valkey-cli -h {host} -p {port} ping"

    def make_opener(self, coder: RecordCoder | None = None) -> Callable[[], ValkeyStore]:
        """Returns a function that opens a connection each time it is called. It raises StoreFaultError if it cannot.
        `coder`: shared by these connections."""
        return partial(ValkeyStore, self, ClusterView(), coder or RecordCoder(self.compress))


class ValkeyStore(SlotStore):
    """A store in Valkey. It belongs to one thread, except for `interrupt`."""

    seals_records = True

    def __init__(self, settings: ValkeySettings, view: ClusterView, coder: RecordCoder) -> None:
        """Connects. StoreFaultError: it cannot."""
        self._coder = coder
        self._ttl_s = settings.ttl_s
        self._nodes = ValkeyNodes(settings, view)

    def put_slots(self, batch: RecordBatch) -> npt.NDArray[np.uint8]:
        names, keys = batch.names, list_keys(batch.names)
        outcomes = np.full(len(keys), RecordOutcome.WRITTEN, np.uint8)
        absent = np.flatnonzero(~np.array(self.look(keys, is_use=True), np.bool_))
        heads = pack_heads(names, batch.record_bytes, batch.digests, batch.parents)
        begin = _begin_command(b"SET", words=5 if self._ttl_s else 3)
        rest = b"\r\n$2\r\nEX\r\n" + _word(b"%d" % self._ttl_s) if self._ttl_s else b"\r\n"
        sent: dict[int, RespConnection] = {}
        outbox = _Outbox()
        sent_bytes = 0
        step = max(_SENT_BYTES // max(batch.record_bytes, 1), 1)
        for part in (absent[first : first + step] for first in range(0, len(absent), step)):
            # While these are on their way the next ones are verified and coded.
            is_whole = digest_slots(names.choose(part), batch.slots[part], batch.record_bytes) == batch.digests[part]
            outcomes[part[~is_whole]] = RecordOutcome.DAMAGED
            for at in part[is_whole].tolist():
                data: Value = view_slot(int(batch.slots[at]), batch.record_bytes)
                head = heads[at].tobytes()
                coded = self._coder.encode(names.group, data)
                if coded is not None or self._coder.keys is not None:
                    name, digest = read_key(keys[at]), int(batch.digests[at])
                    head, data = pack_value(name, data, digest, batch.parent(at), coded=coded, keys=self._coder.keys)
                sent[at] = self._nodes.of(PREFIX + keys[at])
                intro = b"%b%b\r\n$%d\r\n%b" % (begin, keys[at], HEAD_BYTES + len(data), head)
                with self._coder.sending():
                    outbox.add(sent[at], [intro, data, rest], len(data))
                sent_bytes += len(data)
        with self._coder.sending():
            outbox.send()
            lines = self._read_lines(list(sent.values()), refusal="OOM")
            self._coder.told_sent(sent_bytes)
        for at, line in zip(sent, lines, strict=True):
            if line is None:
                outcomes[at] = RecordOutcome.FAILED
        return outcomes

    def get_slots(self, names: RecordNames, slots: Addresses, *, record_bytes: int) -> FoundRecords:
        """Reads records. One that its node lacks because it was moved is a miss; the next call asks the right node."""
        self._nodes.begin()
        keys = list_keys(names)
        arrivals = _Arrivals(RecordBatch(names, slots, record_bytes=record_bytes), keys)
        step = max(_AHEAD_BYTES // (HEAD_BYTES + record_bytes) // 2, 1)
        asked: list[RespConnection] = []
        for first in range(0, len(keys), step):
            asked += self._send_each(keys[len(asked) : first + 2 * step], b"GET")
            answering: defaultdict[RespConnection, list[int]] = defaultdict(list)
            for at, connection in enumerate(asked[first : first + step], first):
                answering[connection].append(at)
            for connection, places in answering.items():
                self._read_records(connection, places, arrivals)
        return arrivals.found()

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        if is_use and self._ttl_s:
            return self._count_each(b"EXPIRE", keys, b"%d" % self._ttl_s)
        return self._count_each(b"TOUCH" if is_use else b"EXISTS", keys)

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        return self._count_each(b"UNLINK", keys)

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        self._nodes.begin()
        connections = self._nodes.primaries()
        at, node = divmod(cursor, NODE_LIMIT)
        if node >= len(connections):
            return 0, []
        asked = connections[node]
        page = check_answer(asked.ask(b"SCAN", b"%d" % at, b"MATCH", PREFIX + b"*", b"COUNT", b"%d" % _SCANNED))
        if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list):
            raise StoreFaultError("it does not speak as it should: a scan without a page")
        following, keys = read_count(as_bytes(page[0])), [as_bytes(key) for key in page[1]]
        asked.send([pack_command(b"GETRANGE", key, b"0", b"%d" % (head_bytes - 1)) for key in keys])
        heads = [head for head in [asked.read_answer() for _ in keys] if isinstance(head, bytes) and head]
        if following:
            return following * NODE_LIMIT + node, heads
        return (node + 1 if node + 1 < len(connections) else 0), heads

    def probe(self) -> StoreFacts:
        """Also whether this user may do what will be done."""
        self._nodes.begin(is_certain=True)
        facts = [self._probe(connection) for connection in self._nodes.primaries()]
        capacities = [fact.capacity_bytes for fact in facts]
        return StoreFacts(
            capacity_bytes=sum(capacities) if all(capacities) else 0,
            used_bytes=sum(fact.used_bytes for fact in facts),
            values=sum(fact.values for fact in facts),
        )

    def interrupt(self) -> None:
        self._nodes.interrupt()

    def close(self) -> None:
        self._nodes.close()

    # ---- calls ----

    def _read_records(self, asked: RespConnection, places: Sequence[int], arrivals: _Arrivals) -> None:
        """Reads the answers for records at these places, in their order."""
        left = np.array(places, np.intp)
        is_small = arrivals.record_bytes <= _MOVED_BYTES
        may_move = asked.moves_records and is_small and self._coder.keys is None
        is_alike = may_move
        while len(left):
            if is_alike:
                came = asked.read_records(*arrivals.rooms(left[:_READ_AT_ONCE]))
                self._coder.told_read(arrivals.take(left[: len(came)], came))
                left = left[len(came) :]
            if len(left):
                # One that is missing, coded or damaged in its length is rarely alone.
                head = self._read_record(asked, *arrivals.wanted(int(left[0])))
                arrivals.settle(int(left[0]), head)
                left = left[1:]
                is_alike = may_move and isinstance(head, RecordHead) and not head.coded_bytes

    def _read_record(self, asked: RespConnection, name: RecordName, room: memoryview) -> RecordHead | Verdict | None:
        """To where it is wanted, if it has the length that is. None: there is none."""
        size = asked.read_size()
        if isinstance(size, ErrorAnswer):
            if size.code == _OTHER_TYPE:
                return Verdict.DAMAGED
            self._read_error(size)
            return None
        if size is None:
            return None
        keys, most_bytes = self._coder.keys, most_value_bytes(len(room), self._coder.keys)
        if size == most_bytes and keys is None:
            value = memoryview(bytearray(HEAD_BYTES))
            asked.read_into(value, room)
            self._coder.told_read(len(room))
            return check_record(value, room, name)
        # Coded ones are shorter.
        value = asked.read_beginning(size, size if size <= most_bytes else HEAD_BYTES)
        begun_s = time.perf_counter()
        opened = open_value(value, name, len(room), room=room, keys=keys)
        if not isinstance(opened, OpenValue):
            return opened
        decoding_s = time.perf_counter() - begun_s if opened.head.coded_bytes else None
        self._coder.told_read(len(room), decoding_s=decoding_s)
        return opened.head

    def _count_each(self, verb: bytes, keys: Sequence[Key], *rest: bytes) -> list[bool]:
        """Those that a cluster is moving to other nodes are asked for twice."""
        self._nodes.begin()
        answers = self._read_lines(self._send_each(keys, verb, *rest))
        if self._nodes.is_map_old and None in answers:
            self._nodes.begin()
            moved = [at for at, answer in enumerate(answers) if answer is None]
            again = self._read_lines(self._send_each([keys[at] for at in moved], verb, *rest))
            for at, answer in zip(moved, again, strict=True):
                answers[at] = answer
        return [answer == b":1" for answer in answers]

    def _send_each(self, keys: Sequence[Key], verb: bytes, *rest: bytes) -> list[RespConnection]:
        """Whom each was sent to."""
        asked = [self._nodes.of(PREFIX + key) for key in keys]
        begin, end = _begin_command(verb, words=2 + len(rest)), b"\r\n" + b"".join(map(_word, rest))
        commands: defaultdict[RespConnection, list[bytes]] = defaultdict(list)
        for connection, key in zip(asked, keys, strict=True):
            commands[connection].append(b"%b%b%b" % (begin, key, end))
        for connection, parts in commands.items():
            connection.send([b"".join(parts)])
        return asked

    def _read_lines(self, asked: Sequence[RespConnection], *, refusal: str = "") -> list[bytes | None]:
        """Answers of one line each, in the order in which they were asked for. None: it was refused, or moved."""
        lines = {connection: iter(connection.read_lines(count)) for connection, count in Counter(asked).items()}
        return [self._read_line(next(lines[connection]), refusal) for connection in asked]

    def _read_line(self, line: bytes, refusal: str) -> bytes | None:
        if line[:1] != b"-":
            return line
        self._read_error(read_error(line), refusal)
        return None

    def _read_error(self, error: ErrorAnswer, refusal: str = "") -> None:
        if error.code in _ELSEWHERE:
            self._nodes.is_map_old = True
        elif error.code != refusal:
            raise StoreFaultError(error.text)

    def _probe(self, connection: RespConnection) -> StoreFacts:
        allowed = (b"GET", b"GETRANGE 0 0", b"EXISTS", b"TOUCH", b"EXPIRE 1", b"UNLINK", b"SET - XX")
        commands = [(verb, _PROBED, *rest) for verb, *rest in map(bytes.split, allowed)]
        connection.send([pack_command(*command) for command in commands])
        for answer in [connection.read_answer() for _ in commands]:
            if isinstance(answer, ErrorAnswer) and answer.code not in (*_ELSEWHERE, _OTHER_TYPE, "OOM"):
                raise StoreFaultError(answer.text)
        memory = dict(
            line.split(b":", 1)
            for line in as_bytes(check_answer(connection.ask(b"INFO", b"memory"))).split()
            if b":" in line
        )
        values = check_answer(connection.ask(b"DBSIZE"))
        return StoreFacts(
            capacity_bytes=read_count(memory.get(b"maxmemory", b"0")),
            used_bytes=read_count(memory.get(b"used_memory", b"0")),
            values=values if isinstance(values, int) and values > 0 else 0,
        )


class _Arrivals:
    """Collects what a get has found so far."""

    def __init__(self, wanted: RecordBatch, keys: Sequence[Key]) -> None:
        self.record_bytes = wanted.record_bytes
        self._wanted = wanted
        self._keys = keys
        self._outcomes = np.full(len(keys), RecordOutcome.MISSING, np.uint8)
        self._digests = np.zeros(len(keys), np.uint64)
        self._parents = np.zeros((len(keys), HASH_BYTES), np.uint8)

    def wanted(self, at: int) -> tuple[RecordName, memoryview]:
        """Returns the name of one record, and the room for it."""
        return read_key(self._keys[at]), view_slot(int(self._wanted.slots[at]), self._wanted.record_bytes)

    def rooms(self, places: npt.NDArray[np.intp]) -> tuple[RecordNames, Addresses, int]:
        """Returns the same of many."""
        return self._wanted.names.choose(places), self._wanted.slots[places], self._wanted.record_bytes

    def take(self, places: npt.NDArray[np.intp], came: CameRecords) -> int:
        """Verifies records that came to their rooms, and returns their bytes."""
        if not len(came):
            return 0
        names, _, record_bytes = self.rooms(places)
        are_whole = came.are(names, record_bytes)
        good = places[are_whole]
        self._outcomes[good] = RecordOutcome.FOUND
        self._digests[good] = came.digests[are_whole]
        self._parents[good] = came.parents[are_whole]
        for at in np.flatnonzero(~are_whole).tolist():
            name, room = self.wanted(int(places[at]))
            self.settle(int(places[at]), check_record(came.heads[at].tobytes(), room, name))
        return len(came) * record_bytes

    def settle(self, at: int, head: RecordHead | Verdict | None) -> None:
        if isinstance(head, RecordHead):
            self._outcomes[at], self._digests[at] = RecordOutcome.FOUND, head.digest
            self._parents[at] = np.frombuffer(head.parent, np.uint8)
        elif head is Verdict.DAMAGED:
            self._outcomes[at] = RecordOutcome.DAMAGED

    def found(self) -> FoundRecords:
        return FoundRecords(outcomes=self._outcomes, digests=self._digests, parents=self._parents.tobytes())


class _Outbox:
    """Commands that go out together, to each node its own."""

    def __init__(self) -> None:
        self._parts: dict[RespConnection, list[Value]] = {}
        self._bytes = 0

    def add(self, connection: RespConnection, parts: list[Value], size_bytes: int) -> None:
        self._parts.setdefault(connection, []).extend(parts)
        self._bytes += size_bytes
        if self._bytes >= _SENT_BYTES:
            self.send()

    def send(self) -> None:
        for connection, parts in self._parts.items():
            connection.send(parts)
        self._parts.clear()
        self._bytes = 0


def _begin_command(verb: bytes, *, words: int) -> bytes:
    """Begins a command, up to what names the record within its key."""
    return b"*%d\r\n%b$%d\r\n%b" % (words, _word(verb), len(PREFIX) + KEY_BYTES, PREFIX)


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)

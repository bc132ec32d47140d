"""Valkey, or Redis, as a record store: one server or a cluster, which says itself what it is.

Records are values of their own, with a time to live where one is set; what the server evicts when it is full is its own
policy's business.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Addresses, RecordBatch, RecordNames, RecordOutcome
from kvoffload.tiers.envelope import (
    HEAD_BYTES,
    OpenValue,
    RecordHead,
    RecordName,
    Verdict,
    check_record,
    digest_of,
    list_names,
    open_value,
)
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import FoundRecords, Key, SlotStore, StoreFacts, StoreFaultError, Value, view_slot
from kvoffload.tiers.remote import RemoteTier, RemoteTierTerms
from kvoffload.tiers.resp_connection import ErrorAnswer, RespConnection, pack_command, read_count, read_error
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyAccess, ValkeyNodes, as_bytes, check_answer
from kvoffload.tiers.valkey_slots import NODE_LIMIT
from kvoffload.types import HASH_BYTES

PREFIX = b"kvoffload:1:"
"""Of every key; the number is that of the envelope's layout."""
_PROBED = PREFIX + b"probe"
"""A key that nobody writes."""
_SCANNED = 256
_SENT_BYTES = 256 << 10
"""Smaller values leave together."""
_AHEAD_BYTES = 2 << 20
"""Asked for before it is read: the server copies what it has to send, best while that is in its caches."""
_ELSEWHERE = ("MOVED", "ASK", "TRYAGAIN")


@dataclass(frozen=True, kw_only=True)
class ValkeyTerms(ValkeyAccess):
    """Says how a tier reaches a server."""

    connections: int = 4
    ttl_s: int = 0
    """0: records stay until the server evicts them."""
    compress: Coding = Coding.OFF

    def describe(self) -> str:
        """Describes the server in a few words."""
        return str(self.address)

    def open_tier(self) -> RemoteTier:
        """Opens the tier and starts its threads; the server need not be there."""
        coder = RecordCoder(self.compress)
        return RemoteTier(
            RemoteTierTerms(
                place=str(self.address),
                open_store=self.make_opener(coder),
                connections=self.connections,
                coder=coder,
            )
        )

    def make_opener(self, coder: RecordCoder | None = None) -> Callable[[], ValkeyStore]:
        """Returns what opens a connection each time it is called. StoreFaultError: none is to be had. `coder`: what
        these connections share."""
        return partial(ValkeyStore, self, ClusterView(), coder or RecordCoder(self.compress))


class ValkeyStore(SlotStore):
    """Is a store in Valkey. Belongs to one thread, but for `interrupt`."""

    def __init__(self, terms: ValkeyTerms, view: ClusterView, coder: RecordCoder) -> None:
        """Connects. StoreFaultError: it cannot."""
        self._coder = coder
        self._ttl_s = terms.ttl_s
        self._nodes = ValkeyNodes(terms, view)

    def put_slots(self, batch: RecordBatch) -> npt.NDArray[np.uint8]:
        wanted = list(list_names(batch.names))
        outcomes = np.full(len(wanted), RecordOutcome.WRITTEN, np.uint8)
        there = self.look([name.key for name in wanted], is_use=True)
        ttl = self._ttl_s
        rest = b"\r\n$2\r\nEX\r\n" + _word(b"%d" % ttl) if ttl else b"\r\n"
        sent: dict[int, RespConnection] = {}
        outbox = _Outbox()
        sent_bytes = 0
        for at, name in enumerate(wanted):
            if there[at]:
                continue
            record = view_slot(int(batch.slots[at]), batch.record_bytes)
            # While these are on their way the next ones are verified and coded.
            digest = digest_of(record, name)
            if digest != int(batch.digests[at]):
                outcomes[at] = RecordOutcome.DAMAGED
                continue
            coded = self._coder.encode(name.group, record)
            data: Value = record if coded is None else coded
            words = 5 if ttl else 3
            begin = b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n" % (words, _word(PREFIX + name.key), HEAD_BYTES + len(data))
            sent[at] = self._nodes.of(PREFIX + name.key)
            head = RecordHead(name, batch.record_bytes, digest, batch.parent(at), len(coded or b"")).pack()
            with self._coder.sending():
                outbox.add(sent[at], [begin, head, data, rest], len(data))
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
        """What a node does not have any more because it was moved is a miss; the next call knows better."""
        self._nodes.begin()
        wanted = list(list_names(names))
        outcomes = np.full(len(wanted), RecordOutcome.MISSING, np.uint8)
        digests = np.zeros(len(wanted), np.uint64)
        parents = [bytes(HASH_BYTES)] * len(wanted)
        ahead = max(_AHEAD_BYTES // (HEAD_BYTES + record_bytes), 2)
        asked: list[RespConnection] = []
        for at, name in enumerate(wanted):
            if len(asked) - at <= ahead // 2:
                asked += self._send_each([name.key for name in wanted[len(asked) : at + ahead]], b"GET")
            head = self._read_record(asked[at], name, view_slot(int(slots[at]), record_bytes))
            if isinstance(head, RecordHead):
                outcomes[at], digests[at], parents[at] = RecordOutcome.FOUND, head.digest, head.parent
            elif head is Verdict.DAMAGED:
                outcomes[at] = RecordOutcome.DAMAGED
        return FoundRecords(outcomes=outcomes, digests=digests, parents=b"".join(parents))

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

    def _read_record(self, asked: RespConnection, name: RecordName, room: memoryview) -> RecordHead | Verdict | None:
        """To where it is wanted, if it has the length that is. None: there is none."""
        size = asked.read_size()
        if isinstance(size, ErrorAnswer):
            self._read_error(size)
            return None
        if size is None:
            return None
        if size == HEAD_BYTES + len(room):
            value = memoryview(bytearray(HEAD_BYTES))
            asked.read_into(value, room)
            self._coder.told_read(len(room))
            return check_record(value, room, name)
        # Coded ones are shorter.
        value = asked.read_beginning(size, size if size < HEAD_BYTES + len(room) else HEAD_BYTES)
        begun_s = time.perf_counter()
        opened = open_value(value, name, len(room), room=room)
        if not isinstance(opened, OpenValue):
            return opened
        self._coder.told_read(len(room), decoding_s=time.perf_counter() - begun_s)
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
        outbox = _Outbox()
        for connection, key in zip(asked, keys, strict=True):
            outbox.add(connection, [pack_command(verb, PREFIX + key, *rest)], 0)
        outbox.send()
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
            if isinstance(answer, ErrorAnswer) and answer.code not in (*_ELSEWHERE, "OOM"):
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


def _word(word: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(word), word)

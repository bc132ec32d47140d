"""Valkey, or Redis, as a record store: one server or a cluster, which says itself what it is.

Records are values of their own, with a time to live where one is set; what the server evicts when it is full is its own
policy's business.
"""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvoffload.tiers.record_store import Key, StoreFacts, StoreFaultError, Value
from kvoffload.tiers.remote import RemoteTier, RemoteTierTerms
from kvoffload.tiers.resp_connection import Answer, ErrorAnswer, RespConnection, pack_command
from kvoffload.tiers.valkey_slots import NODE_LIMIT, Node, SlotMap, read_slots, slot_of
from kvoffload.valkey_address import ValkeyAddress

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
class ValkeyTerms:
    """How it is reached."""

    address: ValkeyAddress
    password: str = field(default="", repr=False)
    ca_file: str = ""
    """Whose certificates are trusted; empty for those that the machine trusts."""
    cert_file: str = ""
    key_file: str = ""
    """What this client shows, where the server asks for it."""
    call_timeout_s: float = 1.0
    connections: int = 4
    ttl_s: int = 0
    """0: records stay until the server evicts them."""

    def describe(self) -> str:
        """In a few words."""
        return str(self.address)

    def open_tier(self) -> RemoteTier:
        """Starts its threads; the server need not be there."""
        return RemoteTier(
            RemoteTierTerms(place=str(self.address), open_store=ValkeyDoor(self).open, connections=self.connections)
        )


class ValkeyDoor:
    """Any thread may open a store. What one of them learns of a cluster all know, also when its first node is gone."""

    def __init__(self, terms: ValkeyTerms) -> None:
        self.terms = terms
        self.slots: SlotMap | None = None
        """None: no cluster was seen yet."""

    def open(self) -> ValkeyStore:
        """Connects. StoreFaultError."""
        return ValkeyStore(self)

    def connect(self, node: Node) -> RespConnection:
        """To one node, as the user that is meant. StoreFaultError."""
        terms = self.terms
        connection = RespConnection(*node, timeout_s=terms.call_timeout_s, tls=self._make_tls())
        try:
            if terms.address.user or terms.password:
                user = [terms.address.user.encode()] if terms.address.user else []
                _check(connection.ask(b"AUTH", *user, terms.password.encode()))
            if terms.address.database:
                _check(connection.ask(b"SELECT", b"%d" % terms.address.database))
        except StoreFaultError:
            connection.close()
            raise
        return connection

    def _make_tls(self) -> ssl.SSLContext | None:
        terms = self.terms
        if not terms.address.has_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=terms.ca_file or None)
            if terms.cert_file:
                context.load_cert_chain(terms.cert_file, terms.key_file or None)
        except OSError as fault:
            raise StoreFaultError(f"certificates cannot be read: {' '.join(str(fault).split())}") from fault
        return context


class ValkeyStore:
    """A RecordStore."""

    def __init__(self, door: ValkeyDoor) -> None:
        self._door = door
        self._named = (door.terms.address.host, door.terms.address.port)
        self._nodes: dict[Node, RespConnection] = {}
        self._is_cluster = self._is_map_old = False
        self._value_bytes = 0
        """Of the last one that was got."""
        try:
            first = self._connect_any()
            if b"cluster_enabled:1" in _bytes(_check(self._nodes[first].ask(b"INFO", b"cluster"))):
                self._learn(first)
        except StoreFaultError:
            self.close()
            raise

    def put(self, records: Iterable[tuple[Key, Sequence[Value]]]) -> list[bool]:
        """What a node does not take because it was moved is refused; the next call knows better."""
        self._learn_if_old()
        ttl = [b"\r\n$2\r\nEX\r\n", _word(b"%d" % self._door.terms.ttl_s)] if self._door.terms.ttl_s else [b"\r\n"]
        asked: list[RespConnection] = []
        outbox = _Outbox()
        for key, parts in records:
            size = sum(map(len, parts))
            begin = b"*%d\r\n$3\r\nSET\r\n%b$%d\r\n" % (2 * len(ttl) + 1, _word(PREFIX + key), size)
            asked.append(self._of(key))
            # While these are on their way the next ones are made ready.
            outbox.add(asked[-1], [begin, *parts, *ttl], size)
        outbox.send()
        return [line is not None for line in self._read_lines(asked, refusal="OOM")]

    def get(self, keys: Sequence[Key]) -> Iterator[memoryview | None]:
        """What a node does not have any more because it was moved is a miss; the next call knows better."""
        self._learn_if_old()
        asked: list[RespConnection] = []
        taken = 0
        try:
            while taken < len(keys):
                ahead = max(_AHEAD_BYTES // (self._value_bytes + 1), 2)
                if len(asked) - taken <= ahead // 2:
                    asked += self._send_each(keys[len(asked) : taken + ahead], b"GET")
                value = asked[taken].read_value()
                taken += 1
                if isinstance(value, ErrorAnswer):
                    self._read_error(value)
                    value = None
                if value is not None:
                    self._value_bytes = len(value)
                yield value
        finally:
            if taken < len(asked):
                # Answers to nobody's question.
                self.close()

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        if is_use and self._door.terms.ttl_s:
            return self._count_each(b"EXPIRE", keys, b"%d" % self._door.terms.ttl_s)
        return self._count_each(b"TOUCH" if is_use else b"EXISTS", keys)

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        return self._count_each(b"UNLINK", keys)

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        connections = self._primaries()
        at, node = divmod(cursor, NODE_LIMIT)
        if node >= len(connections):
            return 0, []
        asked = connections[node]
        page = _check(asked.ask(b"SCAN", b"%d" % at, b"MATCH", PREFIX + b"*", b"COUNT", b"%d" % _SCANNED))
        if not isinstance(page, list) or len(page) != 2 or not isinstance(page[1], list):
            raise StoreFaultError("it does not speak as it should: a scan without a page")
        following, keys = int(_bytes(page[0])), [_bytes(key) for key in page[1]]
        asked.send([pack_command(b"GETRANGE", key, b"0", b"%d" % (head_bytes - 1)) for key in keys])
        heads = [head for head in [asked.read_answer() for _ in keys] if isinstance(head, bytes) and head]
        if following:
            return following * NODE_LIMIT + node, heads
        return (node + 1 if node + 1 < len(connections) else 0), heads

    def probe(self) -> StoreFacts:
        """Also whether this user may do what will be done."""
        self._learn_if_old(is_certain=True)
        facts = [self._probe(connection) for connection in self._primaries()]
        capacities = [fact.capacity_bytes for fact in facts]
        return StoreFacts(
            capacity_bytes=sum(capacities) if all(capacities) else 0,
            used_bytes=sum(fact.used_bytes for fact in facts),
            values=sum(fact.values for fact in facts),
        )

    def close(self) -> None:
        for connection in self._nodes.values():
            connection.close()
        self._nodes.clear()

    # ---- nodes ----

    def _connect_any(self) -> Node:
        """The node that is named, or another one if it is known to be of a cluster. The first one's fault counts."""
        faults = []
        for node in dict.fromkeys((self._named, *(self._door.slots.nodes if self._door.slots else ()))):
            try:
                self._nodes[node] = self._door.connect(node)
            except StoreFaultError as fault:
                faults.append(fault)
            else:
                return node
        raise faults[0]

    def _learn(self, node: Node) -> None:
        """Which nodes there are, from one of them."""
        slots = read_slots(_check(self._connection(node).ask(b"CLUSTER", b"SLOTS")), node)
        self._door.slots = slots
        self._is_cluster, self._is_map_old = True, False
        for gone in self._nodes.keys() - set(slots.primaries) - {node}:
            self._nodes.pop(gone).close()

    def _learn_if_old(self, *, is_certain: bool = False) -> None:
        if self._is_cluster and (self._is_map_old or is_certain):
            self._learn(next(iter(self._nodes), None) or self._connect_any())

    def _connection(self, node: Node) -> RespConnection:
        if node not in self._nodes:
            self._nodes[node] = self._door.connect(node)
        return self._nodes[node]

    def _of(self, key: Key) -> RespConnection:
        if self._is_cluster and self._door.slots:
            return self._connection(self._door.slots.find(slot_of(PREFIX + key)))
        return self._connection(self._named)

    def _primaries(self) -> list[RespConnection]:
        if self._is_cluster and self._door.slots:
            return [self._connection(node) for node in self._door.slots.primaries]
        return [self._connection(self._named)]

    # ---- calls ----

    def _count_each(self, verb: bytes, keys: Sequence[Key], *rest: bytes) -> list[bool]:
        """Those that a cluster is moving to other nodes are asked for twice."""
        self._learn_if_old()
        answers = self._read_lines(self._send_each(keys, verb, *rest))
        if self._is_map_old and None in answers:
            self._learn_if_old()
            moved = [at for at, answer in enumerate(answers) if answer is None]
            again = self._read_lines(self._send_each([keys[at] for at in moved], verb, *rest))
            for at, answer in zip(moved, again, strict=True):
                answers[at] = answer
        return [answer == b":1" for answer in answers]

    def _send_each(self, keys: Sequence[Key], verb: bytes, *rest: bytes) -> list[RespConnection]:
        """Whom each was sent to."""
        asked = [self._of(key) for key in keys]
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
        self._read_error(ErrorAnswer(line[1:].decode(errors="replace")), refusal)
        return None

    def _read_error(self, error: ErrorAnswer, refusal: str = "") -> None:
        if error.code in _ELSEWHERE:
            self._is_map_old = True
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
            line.split(b":", 1) for line in _bytes(_check(connection.ask(b"INFO", b"memory"))).split() if b":" in line
        )
        values = _check(connection.ask(b"DBSIZE"))
        return StoreFacts(
            capacity_bytes=int(memory.get(b"maxmemory", 0)),
            used_bytes=int(memory.get(b"used_memory", 0)),
            values=values if isinstance(values, int) else 0,
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


def _check(answer: Answer) -> Answer:
    if isinstance(answer, ErrorAnswer):
        raise StoreFaultError(answer.text)
    return answer


def _bytes(answer: Answer) -> bytes:
    if not isinstance(answer, bytes):
        raise StoreFaultError("it does not speak as it should")
    return answer

"""Connections to one server, or to the nodes of a cluster, of which any may go and others come."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import Answer, ErrorAnswer, RespConnection
from kvoffload.tiers.valkey_slots import Node, SlotMap, read_slots, slot_of


@dataclass(frozen=True, kw_only=True)
class ValkeyAccess:
    """How a connection reaches the server, or the first node of a cluster."""

    address: ValkeyAddress
    password: str = field(default="", repr=False)
    ca_file: str = ""
    """File of the certificate authorities to trust; empty for those that the machine trusts."""
    cert_file: str = ""
    key_file: str = ""
    """File of the key for `cert_file`, the client's certificate for servers that ask for one."""
    call_timeout_s: float = 1.0


@dataclass(eq=False)
class ClusterView:
    """The map of a cluster, shared by all threads that use it: one learns it for all, and the first node may be
    gone."""

    slots: SlotMap | None = None
    """The map of slots, or None if no cluster was seen yet."""


class ValkeyNodes:
    """The connections to a server or a cluster. They belong to one thread, except for `interrupt`."""

    def __init__(self, settings: ValkeyAccess, view: ClusterView) -> None:
        """Connects. StoreFaultError: it cannot."""
        self._settings = settings
        self._view = view
        self._named = (settings.address.host, settings.address.port)
        self._nodes: dict[Node, RespConnection] = {}
        self._is_cluster = False
        self._is_cut = False
        """Whether connections were interrupted."""
        self.is_map_old = False
        """Whether a node has said that it does not have a key any more."""
        try:
            first = self._connect_any()
            if b"cluster_enabled:1" in as_bytes(check_answer(self._nodes[first].ask(b"INFO", b"cluster"))):
                self._learn(first)
        except StoreFaultError:
            self.close()
            raise

    def begin(self, *, is_certain: bool = False) -> None:
        """Begins a call: by connections that are whole, to the nodes that there are now."""
        if self._is_cut:
            self.close()
            self._is_cut = False
        if self._is_cluster and (self.is_map_old or is_certain):
            self._learn(next(iter(self._nodes), None) or self._connect_any())

    def of(self, key: bytes) -> RespConnection:
        """Returns the connection to the node that has a key."""
        if self._is_cluster and self._view.slots:
            return self._connection(self._view.slots.find(slot_of(key)))
        return self._connection(self._named)

    def primaries(self) -> list[RespConnection]:
        """Returns connections to all nodes that have keys."""
        if self._is_cluster and self._view.slots:
            return [self._connection(node) for node in self._view.slots.primaries]
        return [self._connection(self._named)]

    def interrupt(self) -> None:
        """Interrupts all connections, from any thread: what is under way fails. A node that is just being connected to
        has its timeout."""
        self._is_cut = True
        for connection in list(self._nodes.values()):
            connection.interrupt()

    def close(self) -> None:
        for connection in self._nodes.values():
            connection.close()
        self._nodes.clear()

    # ---- inside ----

    def _connect_any(self) -> Node:
        """Connects to the node of the settings, or to another known node of its cluster. Raises the first one's
        fault."""
        faults = []
        for node in dict.fromkeys((self._named, *(self._view.slots.nodes if self._view.slots else ()))):
            try:
                self._nodes[node] = self._connect(node)
            except StoreFaultError as fault:
                faults.append(fault)
            else:
                return node
        raise faults[0]

    def _learn(self, node: Node) -> None:
        """Learns which nodes there are, from one of them."""
        slots = read_slots(check_answer(self._connection(node).ask(b"CLUSTER", b"SLOTS")), node)
        self._view.slots = slots
        self._is_cluster, self.is_map_old = True, False
        for gone in self._nodes.keys() - set(slots.primaries) - {node}:
            self._nodes.pop(gone).close()

    def _connection(self, node: Node) -> RespConnection:
        if node not in self._nodes:
            self._nodes[node] = self._connect(node)
        return self._nodes[node]

    def _connect(self, node: Node) -> RespConnection:
        """Connects to one node, as the user of the settings. StoreFaultError: it cannot."""
        settings = self._settings
        connection = RespConnection(*node, timeout_s=settings.call_timeout_s, tls=self._make_tls())
        try:
            if settings.address.user or settings.password:
                user = [settings.address.user.encode()] if settings.address.user else []
                check_answer(connection.ask(b"AUTH", *user, settings.password.encode()))
            if settings.address.database:
                check_answer(connection.ask(b"SELECT", b"%d" % settings.address.database))
        except StoreFaultError:
            connection.close()
            raise
        return connection

    def _make_tls(self) -> ssl.SSLContext | None:
        settings = self._settings
        if not settings.address.has_tls:
            return None
        try:
            context = ssl.create_default_context(cafile=settings.ca_file or None)
            if settings.cert_file:
                context.load_cert_chain(settings.cert_file, settings.key_file or None)
        except OSError as fault:
            raise StoreFaultError(f"certificates cannot be read: {' '.join(str(fault).split())}") from fault
        return context


def check_answer(answer: Answer) -> Answer:
    """Returns an answer. StoreFaultError: it is an error."""
    if isinstance(answer, ErrorAnswer):
        raise StoreFaultError(answer.text)
    return answer


def as_bytes(answer: Answer) -> bytes:
    """Returns an answer that is bytes. StoreFaultError: it is something else."""
    if not isinstance(answer, bytes):
        raise StoreFaultError("it does not speak as it should")
    return answer

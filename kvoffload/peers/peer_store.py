"""Another machine's cache server as a store: one data link, by which records go from slot to slot."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.peers.coded_records import receive_records, send_records
from kvoffload.peers.control_link import ControlLink, LinkTicket
from kvoffload.peers.link_hello import (
    HELLO_ANSWER_BYTES,
    NONCE_BYTES,
    HelloVerdict,
    LinkHello,
    LinkSecret,
    is_proof,
    read_hello_answer,
)
from kvoffload.peers.receiving import receive_exactly
from kvoffload.peers.requests import (
    ANSWER_BYTES,
    CODE,
    BadRequestError,
    LinkAnswer,
    LinkRequest,
    LinkStatus,
    LinkVerb,
    pack_code,
    read_answer,
    read_answer_head,
)
from kvoffload.peers.space_table import SpaceTable
from kvoffload.tiers.base import Addresses, RecordBatch, RecordNames, RecordOutcome
from kvoffload.tiers.envelope import read_key
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.record_store import FoundRecords, Key, SlotStore, StoreFacts, StoreFaultError
from kvoffload.types import HASH_BYTES

_NOTHING = RecordNames(fingerprint=bytes(HASH_BYTES), hashes=b"")
_COUNTS = 2


@dataclass(frozen=True, kw_only=True)
class PeerStoreSettings:
    """The settings with which the store of one peer is reached."""

    control: ControlLink
    spaces: SpaceTable
    is_sealed: bool = True
    timeout_s: float = 1.0
    coder: RecordCoder = field(default_factory=RecordCoder)
    """The coder of records, which all links to the peer share."""


Connect = Callable[[LinkTicket, PeerStoreSettings], tuple[socket.socket, native.RecordLink]]


class PeerStore(SlotStore):
    """One data link. It belongs to one thread, except for `interrupt`."""

    def __init__(self, settings: PeerStoreSettings, connect: Connect | None = None) -> None:
        """Connects, as `connect_link` does if nothing else is said. StoreFaultError: it cannot."""
        self._settings = settings
        self._lock = threading.Lock()
        self._is_interrupted = False
        self._end: socket.socket | None = None
        ticket = settings.control.find_ticket(is_sealed=settings.is_sealed)
        try:
            self._end, self._link = (connect or connect_link)(ticket, settings)
        except StoreFaultError:
            settings.control.forget_ticket(ticket)
            raise

    def put_slots(self, batch: RecordBatch) -> npt.NDArray[np.uint8]:
        request = LinkRequest(
            verb=LinkVerb.PUT,
            names=batch.names,
            record_bytes=batch.record_bytes,
            digests=np.ascontiguousarray(batch.digests).tobytes(),
            parents=batch.parents or bytes(len(batch.names) * HASH_BYTES),
            code=CODE if self._settings.coder.gives(len(batch.names) * batch.record_bytes) else 0,
        )
        with self._faults():
            told = self._ask(request)
            if told is None:
                return np.full(len(batch.names), RecordOutcome.FAILED, np.uint8)
            wanted = told.outcomes == 0
            send_records(
                self._link,
                batch.slots[wanted],
                batch.record_bytes,
                head=pack_code if told.code else lambda _: b"",
                coder=self._settings.coder,
                group=batch.names.group,
                may_code=told.code == CODE,
                timeout_s=self._settings.timeout_s,
            )
            return self._read_records(len(batch.names)).outcomes

    def get_slots(self, names: RecordNames, slots: Addresses, *, record_bytes: int) -> FoundRecords:
        with self._faults():
            code = CODE if self._settings.coder.asks(len(names) * record_bytes) else 0
            begun_s = time.monotonic()
            try:
                told = self._ask(
                    LinkRequest(
                        verb=LinkVerb.GET, names=names, record_bytes=record_bytes, wait_ms=self._timeout_ms, code=code
                    )
                )
                if told is None:
                    return _find_nothing(len(names))
                code = told.code
                outcomes = told.outcomes.copy()
                found = outcomes == RecordOutcome.FOUND
                came = receive_records(
                    self._link,
                    names.choose(found),
                    slots[found],
                    record_bytes,
                    claimed=told.digests[found],
                    code=code,
                    coder=self._settings.coder,
                    timeout_s=self._settings.timeout_s,
                )
            except OSError as fault:
                # A peer codes records before it answers, so coding may also be why no answer came.
                if code and (self._is_interrupted or isinstance(fault, TimeoutError)):
                    taken_s = time.monotonic() - begun_s
                    self._settings.coder.told_late(len(names) * record_bytes, taken_s=taken_s)
                raise
        digests = np.zeros(len(names), np.uint64)
        digests[found] = came
        outcomes[found & (digests != told.digests)] = RecordOutcome.DAMAGED
        return FoundRecords(outcomes=outcomes, digests=digests, parents=b"")

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        return list(map(bool, self._ask_each(LinkVerb.LOOK, keys) == RecordOutcome.FOUND))

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        outcomes = self._ask_each(LinkVerb.REMOVE, keys)
        if (outcomes == RecordOutcome.FAILED).any():
            self.close()
            raise StoreFaultError("it could not remove all that it was told to")
        return list(map(bool, outcomes == RecordOutcome.REMOVED))

    def probe(self) -> StoreFacts:
        with self._faults():
            self._send(LinkRequest(verb=LinkVerb.COUNT, names=_NOTHING))
            told = self._read_records(_COUNTS)
        return StoreFacts(capacity_bytes=int(told.digests[0]), used_bytes=int(told.digests[1]))

    def interrupt(self) -> None:
        self._is_interrupted = True
        with self._lock:
            if self._end is not None:
                with contextlib.suppress(OSError):
                    self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    # ---- inside ----

    @property
    def _timeout_ms(self) -> int:
        return max(int(self._settings.timeout_s * 1000), 1)

    def _introduce(self, fingerprint: bytes) -> bool:
        space = self._settings.spaces.find(fingerprint)
        return space is not None and self._settings.control.introduce(space)

    def _ask_each(self, verb: LinkVerb, keys: Sequence[Key]) -> npt.NDArray[np.uint8]:
        if not keys:
            return np.empty(0, np.uint8)
        names = [read_key(key) for key in keys]
        first = names[0]
        hashes = b"".join(name.block_hash for name in names)
        asked = RecordNames(fingerprint=first.fingerprint, hashes=hashes, group=first.group, shard=first.shard)
        with self._faults():
            told = self._ask(LinkRequest(verb=verb, names=asked, wait_ms=self._timeout_ms))
        return np.full(len(keys), RecordOutcome.MISSING, np.uint8) if told is None else told.outcomes

    def _ask(self, request: LinkRequest) -> LinkAnswer | None:
        """Asks the peer. None: the peer does not take records of this identity."""
        for is_introduced in (False, True):
            self._send(request)
            told = self._read(len(request.names), code=request.code)
            if told.status is LinkStatus.OK:
                return told
            if is_introduced or not self._introduce(request.names.fingerprint):
                break
        return None

    def _send(self, request: LinkRequest) -> None:
        self._link.send(request.pack(), timeout_ms=self._timeout_ms)

    def _read(self, count: int, *, code: int = 0) -> LinkAnswer:
        head = read_answer_head(self._link.receive(ANSWER_BYTES, timeout_ms=self._timeout_ms), count, code=code)
        rest = self._link.receive(head.rest_bytes, timeout_ms=self._timeout_ms) if head.rest_bytes else b""
        return read_answer(head, rest)

    def _read_records(self, count: int) -> LinkAnswer:
        """Reads an answer about records. BadRequestError: an answer about so many records was due, and this one says
        something else."""
        told = self._read(count)
        if told.status is not LinkStatus.OK:
            raise BadRequestError(f"it answers {told.status.name} where it was to tell of {count} records")
        return told

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (OSError, BadRequestError) as fault:
            self.close()
            raise StoreFaultError(str(fault) or type(fault).__name__) from fault


def connect_link(ticket: LinkTicket, settings: PeerStoreSettings) -> tuple[socket.socket, native.RecordLink]:
    """A link that both ends have proven to be theirs, and its socket. StoreFaultError: there is none to be had."""
    address, timeout_s = ticket.address, settings.timeout_s
    with contextlib.ExitStack() as undo:
        try:
            end = undo.enter_context(socket.create_connection((address.host, address.port), timeout_s))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keys = _shake_hands(end, ticket, settings)
            link = native.RecordLink(os.dup(end.fileno()), keys)
        except (OSError, ValueError, RuntimeError) as fault:
            raise StoreFaultError(f"no link to {address}: {fault}") from fault
        undo.pop_all()
        return end, link


def _shake_hands(end: socket.socket, ticket: LinkTicket, settings: PeerStoreSettings) -> tuple[bytes, bytes] | None:
    """Keys to send and to receive with; None: it is not sealed."""
    hello = LinkHello(token=ticket.token, nonce=secrets.token_bytes(NONCE_BYTES), is_sealed=settings.is_sealed).pack()
    end.sendall(hello)
    answer = read_hello_answer(receive_exactly(end, HELLO_ANSWER_BYTES, time.monotonic() + settings.timeout_s))
    if answer.verdict is not HelloVerdict.WELCOME:
        raise ValueError(_REFUSALS[answer.verdict])
    secret = LinkSecret(ticket.secret, hello, answer.nonce)
    if not is_proof(answer.proof, secret.server_proof):
        raise ValueError("the server that answers there does not know the session's secret")
    end.sendall(secret.client_proof)
    return (secret.client_key, secret.server_key) if settings.is_sealed else None


def _find_nothing(count: int) -> FoundRecords:
    return FoundRecords(
        outcomes=np.full(count, RecordOutcome.MISSING, np.uint8), digests=np.zeros(count, np.uint64), parents=b""
    )


_REFUSALS = {
    HelloVerdict.UNKNOWN: "it does not know our session (any more)",
    HelloVerdict.OTHER_MODE: "one side has peer_link = trusted, and the other one sealed",
    HelloVerdict.BUSY: "it has as many links as it may have, or no memory yet",
    HelloVerdict.OTHER_VERSION: "it speaks another version",
}

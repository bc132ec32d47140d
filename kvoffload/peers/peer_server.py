"""Serves other machines' links: a thread that lets them in, and one for each of them."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvoffload import native
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import ConfigError
from kvoffload.peers.coded_records import receive_records, send_records
from kvoffload.peers.fleet_member import MAX_MEMBERS
from kvoffload.peers.link_hello import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    TOKEN_BYTES,
    HelloAnswer,
    HelloVerdict,
    LinkSecret,
    is_proof,
    read_hello,
)
from kvoffload.peers.peer_access import PeerAccess
from kvoffload.peers.receiving import receive_exactly
from kvoffload.peers.requests import (
    CODE,
    CODE_BYTES,
    HEAD_BYTES,
    BadRequestError,
    LinkAnswer,
    LinkRequest,
    LinkStatus,
    LinkVerb,
    answer_only,
    read_code,
    read_head,
)
from kvoffload.peers.seal_library import find_seal_library
from kvoffload.tiers.base import RecordOutcome
from kvoffload.tiers.record_coder import Coding, RecordCoder

logger = logging.getLogger(__name__)

MAX_LINKS = 8 * MAX_MEMBERS
"""The most links of peers together; beyond it new ones are refused."""
MAX_NEWCOMERS = 64
"""The most links without proof of their peer. One more ends the oldest, so that waiting links cannot keep peers out."""
MAX_OF_ONE_PEER = 16
SESSIONS_OF_ONE_PEER = 8
"""The most secrets that are good at a time; the oldest is forgotten."""
HELLO_TIMEOUT_S = 5.0
STEP_TIMEOUT_S = 10.0
"""Timeout of each part of a request that has begun, and of each part of its answer."""
WAIT_SHARE = 0.5
"""Share of a client's timeout that may pass before the answer begins, while the server's loop does what it can."""
LOG_S = 60.0
"""Seconds between log lines about one peer's bad links."""
SILENCE_S = 60
"""Seconds of silence after which the system asks whether the other machine is still there, and then lets go."""


@dataclass(frozen=True)
class LinkSession:
    """The token and secret that a peer gets over the control channel, so that it may open links."""

    token: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class _Known:
    peer: str
    domain: str
    secret: bytes = field(repr=False)


class PeerServer:
    """Serves the links of peers, each on its own thread. `open_session` and `attach` may be called from any thread."""

    def __init__(self, address: TcpAddress, *, is_sealed: bool, compress: Coding = Coding.OFF) -> None:
        """Listens at an address. ConfigError: it cannot be used, there is no library to seal with, or no thread can be
        started."""
        self._is_sealed = is_sealed
        if is_sealed:
            _tell_sealer()
        self._compress = compress
        self._encoder = native.BackgroundEncoder()
        self._listener = _listen(address)
        self.address = TcpAddress(address.host, self._listener.getsockname()[1])
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._accesses: dict[str, PeerAccess] = {}
        self._known: dict[bytes, _Known] = {}
        self._tokens: dict[str, deque[bytes]] = {}
        self._coders: dict[str, RecordCoder] = {}
        """The coder of all links of a peer, for each peer that has tokens."""
        self._links: dict[int, tuple[socket.socket, threading.Thread]] = {}
        self._peers: dict[int, str] = {}
        """The peers of links that have proven theirs, by link."""
        self._newcomers: dict[int, socket.socket] = {}
        """Links that have proven nothing; the oldest is the first."""
        self._of_peer: Counter[str] = Counter()
        self._told_s: dict[str, float] = {}
        self._is_closed = False
        self._accepting = threading.Thread(target=self._accept_all, name="kvoffload-peers", daemon=True)
        try:
            self._accepting.start()
        except RuntimeError as fault:
            self._listener.close()
            os.close(self._wake)
            raise ConfigError(f"a thread for links of peers cannot be started: {fault}") from fault

    def attach(self, domain: str, access: PeerAccess) -> None:
        """Adds a domain whose memory is there."""
        with self._lock:
            self._accesses[domain] = access

    def count_links(self, peer: str) -> int:
        """Returns how many links a peer has proven to be its own."""
        with self._lock:
            return self._of_peer[peer]

    def open_session(self, peer: str, domain: str) -> LinkSession:
        """Opens a session for a peer that the control channel knows."""
        made = LinkSession(secrets.token_bytes(TOKEN_BYTES), secrets.token_bytes(32))
        with self._lock:
            if peer not in self._coders:
                self._coders[peer] = RecordCoder(self._compress, encoder=self._encoder)
            tokens = self._tokens.setdefault(peer, deque())
            tokens.append(made.token)
            if len(tokens) > SESSIONS_OF_ONE_PEER:
                self._known.pop(tokens.popleft(), None)
            self._known[made.token] = _Known(peer, domain, made.secret)
        return made

    def __len__(self) -> int:
        """Returns how many links there are."""
        return len(self._links)

    def tick(self) -> None:
        """Does what is due in all domains. The server calls it now and then."""
        with self._lock:
            accesses = list(self._accesses.values())
        for access in accesses:
            access.tick()

    def keep_only(self, is_known: Callable[[str], bool]) -> None:
        """Ends the links of all other peers, and makes their sessions invalid."""
        with self._lock:
            for peer in [peer for peer in self._tokens if not is_known(peer)]:
                for token in self._tokens.pop(peer):
                    del self._known[token]
                del self._coders[peer]
                self._told_s.pop(peer, None)
                for number in [number for number, owner in self._peers.items() if owner == peer]:
                    with contextlib.suppress(OSError):
                        self._links[number][0].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all links. After it no slot is touched."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            links = list(self._links.values())
        os.eventfd_write(self._wake, 1)
        self._accepting.join()
        for end, _ in links:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for _, thread in links:
            thread.join()
        self._listener.close()
        os.close(self._wake)

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while True:
            poller.poll()
            with self._lock:
                if self._is_closed:
                    return
            try:
                end, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError as fault:
                logger.warning("no peer is let in for a moment: %s", fault.strerror)
                select.select([self._wake], [], [], 1.0)
                continue
            self._begin(end)

    def _begin(self, end: socket.socket) -> None:
        end.setblocking(True)
        with contextlib.suppress(OSError):
            _tune(end)
        number = end.fileno()
        thread = threading.Thread(target=self._serve, args=(number, end), name="kvoffload-peer", daemon=True)
        with self._lock:
            if self._is_closed or len(self._links) >= MAX_LINKS + 2 * MAX_NEWCOMERS:
                end.close()
                return
            if len(self._newcomers) >= MAX_NEWCOMERS:
                oldest = self._newcomers.pop(next(iter(self._newcomers)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._links[number] = end, thread
            self._newcomers[number] = end
            try:
                thread.start()
            except RuntimeError as fault:
                self._tell("", "no peer is let in for a moment: %s", fault)
                del self._links[number], self._newcomers[number]
                end.close()

    def _serve(self, number: int, end: socket.socket) -> None:
        """Serves one link until it ends."""
        peer = ""
        try:
            found = self._greet(end, time.monotonic() + HELLO_TIMEOUT_S)
            if found is not None:
                peer, access, link = found
                with self._lock:
                    coder = self._coders.get(peer)
                serve_requests(end, link, access, coder or RecordCoder())
        except BadRequestError as fault:
            self._tell(peer, f"a link of peer {peer}: %s", fault)
        except (OSError, ValueError) as fault:
            logger.debug("a link of peer %s ends: %s", peer or "nobody", fault)
        except Exception:
            # A fault of the cache ends only this link.
            logger.exception("a link of peer %s failed", peer)
        finally:
            with self._lock:
                owner = self._peers.pop(number, None)
                if owner is not None:
                    self._of_peer[owner] -= 1
                    self._of_peer += Counter()  # drops peers without links
                del self._links[number]
                self._newcomers.pop(number, None)
                with contextlib.suppress(OSError):
                    # The other side should see the end, even where the native link still has the socket.
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _tell(self, peer: str, line: str, fault: Exception) -> None:
        """Logs a line, not more often than LOG_S for one peer; there are as many peers as the server was told of."""
        now_s = time.monotonic()
        is_new = now_s >= self._told_s.get(peer, 0.0)
        if is_new:
            self._told_s[peer] = now_s + LOG_S
        logger.log(logging.WARNING if is_new else logging.DEBUG, line, fault)

    def _greet(self, end: socket.socket, end_s: float) -> tuple[str, PeerAccess, native.RecordLink] | None:
        """Greets a link. None: it was refused. OSError, ValueError: it is not from a known peer."""
        hello = receive_exactly(end, HELLO_BYTES, end_s)
        read = read_hello(hello)
        token = b"" if isinstance(read, HelloVerdict) else read.token
        with self._lock:
            known = self._known.get(token)
            access = None if known is None else self._accesses.get(known.domain)
        verdict = read if isinstance(read, HelloVerdict) else self._judge(read.is_sealed, known, access)
        if verdict is not HelloVerdict.WELCOME or known is None or access is None:
            end.sendall(HelloAnswer(verdict=verdict).pack())
            return None
        nonce = secrets.token_bytes(NONCE_BYTES)
        secret = LinkSecret(known.secret, hello, nonce)
        end.sendall(HelloAnswer(verdict=verdict, nonce=nonce, proof=secret.server_proof).pack())
        if not is_proof(receive_exactly(end, PROOF_BYTES, end_s), secret.client_proof):
            raise ValueError("it does not know its session's secret")
        keys = (secret.server_key, secret.client_key) if self._is_sealed else None
        link = native.RecordLink(os.dup(end.fileno()), keys)
        with self._lock:
            if token not in self._known:
                raise ValueError("its session is over")
            if self._of_peer[known.peer] >= MAX_OF_ONE_PEER:
                raise ValueError("it has as many links as it may have")
            self._of_peer[known.peer] += 1
            self._peers[end.fileno()] = known.peer
            self._newcomers.pop(end.fileno(), None)
        return known.peer, access, link

    def _judge(self, is_sealed: bool, known: _Known | None, access: PeerAccess | None) -> HelloVerdict:
        if known is None:
            return HelloVerdict.UNKNOWN
        if is_sealed != self._is_sealed:
            return HelloVerdict.OTHER_MODE
        if access is None or self._of_peer.total() >= MAX_LINKS or self._of_peer[known.peer] >= MAX_OF_ONE_PEER:
            return HelloVerdict.BUSY
        return HelloVerdict.WELCOME


def serve_requests(end: socket.socket, link: native.RecordLink, access: PeerAccess, coder: RecordCoder) -> None:
    poller = select.poll()
    poller.register(end, select.POLLIN)
    verbs: dict[LinkVerb, Callable[[native.RecordLink, PeerAccess, LinkRequest], None]] = {
        LinkVerb.LOOK: _look,
        LinkVerb.GET: partial(_get, coder=coder),
        LinkVerb.PUT: partial(_put, coder=coder),
        LinkVerb.REMOVE: _remove,
        LinkVerb.COUNT: _count,
    }
    step_ms = int(STEP_TIMEOUT_S * 1000)
    while True:
        poller.poll()
        head = read_head(link.receive(HEAD_BYTES, timeout_ms=step_ms))
        rest = link.receive(head.rest_bytes, timeout_ms=step_ms) if head.count else b""
        with access.use(head.fingerprint) as is_known:
            if head.verb is LinkVerb.COUNT or is_known:
                verbs[head.verb](link, access, head.read_rest(rest))
            else:
                _answer(link, answer_only(LinkStatus.UNKNOWN_IDENTITY))


def _answer(link: native.RecordLink, answer: LinkAnswer) -> None:
    link.send(answer.pack(), timeout_ms=int(STEP_TIMEOUT_S * 1000))


def _outcomes(outcomes: np.ndarray) -> LinkAnswer:
    return LinkAnswer(outcomes=outcomes, digests=np.zeros(len(outcomes), np.uint64))


def _look(link: native.RecordLink, access: PeerAccess, request: LinkRequest) -> None:
    _answer(link, _outcomes(access.look(request.names)))


def _remove(link: native.RecordLink, access: PeerAccess, request: LinkRequest) -> None:
    _answer(link, _outcomes(access.remove(request.names, wait_s=_wait_s(request))))


def _count(link: native.RecordLink, access: PeerAccess, request: LinkRequest) -> None:
    _answer(link, LinkAnswer(outcomes=np.zeros(2, np.uint8), digests=np.array(access.count(), np.uint64)))


def _get(link: native.RecordLink, access: PeerAccess, request: LinkRequest, *, coder: RecordCoder) -> None:
    held = access.acquire(request.names, request.record_bytes, wait_s=_wait_s(request))
    try:
        outcomes = np.where(held.found, np.uint8(RecordOutcome.FOUND), np.uint8(RecordOutcome.MISSING))
        digests = np.zeros(len(outcomes), np.uint64)
        digests[held.found] = held.digests
        send_records(
            link,
            held.slots,
            request.record_bytes,
            head=lambda code: LinkAnswer(code=code, outcomes=outcomes, digests=digests).pack(),
            coder=coder,
            group=request.names.group,
            may_code=request.code == CODE,
            timeout_s=STEP_TIMEOUT_S,
        )
    finally:
        access.release(held)


def _put(link: native.RecordLink, access: PeerAccess, request: LinkRequest, *, coder: RecordCoder) -> None:
    names = request.names
    room = access.reserve(names, request.record_bytes)
    if room is None:
        _answer(link, answer_only(LinkStatus.UNKNOWN_IDENTITY))
        return
    claimed = np.frombuffer(request.digests, np.uint64)[room.wanted]
    code = CODE if request.code == CODE and not coder.is_off else 0
    try:
        _answer(link, replace(_outcomes(room.outcomes), code=code))
        code = code and read_code(link.receive(CODE_BYTES, timeout_ms=int(STEP_TIMEOUT_S * 1000)))
        with coder.reading():
            found = receive_records(
                link,
                names.choose(room.wanted),
                room.slots,
                request.record_bytes,
                claimed=claimed,
                code=code,
                coder=coder,
                timeout_s=STEP_TIMEOUT_S,
            )
    except BaseException:
        access.abort(room, names)
        raise
    _answer(link, _outcomes(access.commit(room, names, claimed=claimed, found=found, parents=request.parents)))


def _wait_s(request: LinkRequest) -> float:
    return min(request.wait_ms / 1000, STEP_TIMEOUT_S) * WAIT_SHARE


def _tune(end: socket.socket) -> None:
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENCE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 2 * SILENCE_S * 1000)


def _tell_sealer() -> None:
    try:
        library = find_seal_library()
    except RuntimeError as fault:
        raise ConfigError(
            f"there is nothing to seal links with: {fault}",
            remedy="install Debian's libssl3, or set peer_link = trusted",
        ) from fault
    logger.info("links are sealed by %s", library.describe())


def _listen(address: TcpAddress) -> socket.socket:
    family = socket.AF_INET6 if address.is_version_6 else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.is_version_6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address.host, address.port))
        made.listen(MAX_LINKS)
    except OSError as fault:
        made.close()
        raise ConfigError(
            f"the server cannot listen for peers at {address}: {fault.strerror}",
            remedy="choose another address of this machine, or port",
        ) from fault
    return made

"""The cache server as a process: one loop around the core, its sockets, its memory and the clock."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import zmq

from kvoffload import __version__, native
from kvoffload.cache import CacheOwner, CacheSettings
from kvoffload.packets import Credentials, ReceivedDescriptor
from kvoffload.protocol import (
    CAPABILITIES,
    AdoptVerdict,
    Call,
    ClosingReason,
    Error,
    ErrorCode,
    Express,
    Farewell,
    HandshakeSettings,
    Holding,
    Memory,
    Offer,
    Quarantine,
)
from kvoffload.protocol.limits import MAX_PACKET_SEGMENTS
from kvoffload.server.channels.control import ControlLimits
from kvoffload.server.channels.express_channels import ExpressChannels
from kvoffload.server.channels.foreign_files import NOBODY, ForeignFiles
from kvoffload.server.channels.lifelines import Lifelines
from kvoffload.server.channels.open_files import is_of_reserve
from kvoffload.server.channels.unix_listener import UnixListener
from kvoffload.server.control_channels import ChannelSettings, ControlChannels
from kvoffload.server.core import ServerCore
from kvoffload.server.operators.warning_feed import WarningFeed
from kvoffload.server.peer_links import PeeringPlan, open_peer_links
from kvoffload.server.private_life import PrivateLife, PrivateSettings
from kvoffload.server.sessions.domain import DomainSettings, note_sharing
from kvoffload.server.sessions.memory_record import MemoryRecord
from kvoffload.server.sessions.outbox import Later, OpenExpress, Sendable, SendMemory, ToConnection
from kvoffload.server.sessions.pools import Pools
from kvoffload.server.sessions.session import Peer
from kvoffload.server.sessions.settings import CoreSettings, ServerLimits, TcpSettings
from kvoffload.server.tiering.chain import open_chains
from kvoffload.server.tiering.settings import TierPlan

logger = logging.getLogger(__name__)

TICK_S = 0.25
TAKING_TICK_S = 0.01
"""Most seconds that a turn waits while the first memory is being taken, because engines wait for it."""
EVENTS_AT_ONCE = 16
SWITCH_S = 0.0005
"""Seconds for which another thread of Python may compute while the loop wants to go on. The loop gives way several
times for each message, and Python's own 5 ms each time would be longer than all work for it."""
LOG_PAUSE_NS = 2_000_000
"""Nanoseconds between two looks at the log of stored blocks, so that engines that save block by block do not keep the
loop busy."""
ADOPT_WAIT_S = 3.0
"""Seconds that engines that hold a dead server's memory have to offer it."""
LAST_LOOKS = 64
"""Most times that a private server looks for messages, and serves them, before it ends."""


@dataclass(frozen=True, kw_only=True)
class ServerPlan:
    """The settings of a server, as its loop needs them."""

    socket: Path
    memory: Mapping[str, CacheSettings]
    """Settings of the memory of each domain, by the domain's name."""
    domains: tuple[DomainSettings, ...] = (DomainSettings(name=""),)
    mode: int = 0o600
    group: int | None = None
    adopt_wait_s: float | None = 0.0
    """Seconds that the server waits for engines that hold an old server's memory before it takes new memory. None:
    `ADOPT_WAIT_S` if a former server of this path has left a record of its memory, and else 0."""
    listen_wait_s: float = 0.0
    """Seconds that the server waits for another one that is ending and still has the socket."""
    private: PrivateSettings | None = None
    """Settings of a private server, which also ends with its last engine. None: it ends when stopped or drained."""
    operator_uids: frozenset[int] = field(default_factory=lambda: frozenset({os.getuid()}))
    operator_token: str = field(default="", repr=False)
    remote: TcpSettings | None = None
    """The address for clients over TCP, and who they are. None: it does not listen there."""
    tiers: Mapping[str, Sequence[TierPlan]] = field(default_factory=dict)
    """Tiers slower than memory, by domain."""
    peering: PeeringPlan | None = None
    """The plan by which it serves other servers of its fleet. None: it serves none."""
    hand_over_s: float = 0.0
    """Seconds, from when the server is stopped, in which blocks that no other server has are given to others, if no
    engine keeps the memory."""
    limits: ServerLimits = field(default_factory=ServerLimits)
    connections: ControlLimits = field(default_factory=ControlLimits)
    """Limits of the Unix socket's control channel."""
    on_prompt: Callable[[int, int, int, bytes], None] | None = None


@dataclass(eq=False)
class _Offered:
    """Descriptors of an old server's memory, as far as they have come."""

    uid: int
    files: list[int] = field(default_factory=list)


def find_garbage() -> None:
    """Looks for objects that hold each other and are held by no other, among those made since the last call. The others
    are let go of when nothing holds them any more. A look at all would hold up the loop for 50 ms and more, because
    modules, and the identities that engines register, have a million of them."""
    gc.collect(1)
    gc.freeze()


class CacheServer:
    """Belongs to the thread that calls `run` or `turn`. Any thread may call `stop`, and so may a signal handler."""

    def __init__(self, plan: ServerPlan, *, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Listens on its socket. ConfigError: the socket cannot be used, or a thread cannot be started. Memory is taken
        later, on another thread."""
        self._plan = plan
        self._clock_ns = clock_ns
        self._boot_id = secrets.randbits(63) | 1
        self._poller = zmq.Poller()
        tenants = {
            domain.name: {tenant.name: tenant.quota_bytes for tenant in domain.tenants} for domain in plan.domains
        }
        owners = {
            domain.name: CacheOwner(domain=domain.name, boot_id=self._boot_id, users=domain.uids)
            for domain in plan.domains
        }
        self._offered: dict[int, _Offered] = {}
        self._is_stopping = False
        self._stopped_ns = 0
        """Time at which the server began to end; 0: it has not."""
        self._is_over = False
        self._has_warned = False
        """Whether the log says that processes get no memory. One that gets it resets this."""
        self._next_tick_ns = 0
        self._watch_log_ns = 0
        """Time at which the loop looks at the log of stored blocks again; 0: it watches the log's descriptor."""
        listener = self._listener = UnixListener(
            plan.socket, mode=plan.mode, group=plan.group, wait_s=plan.listen_wait_s
        )
        with contextlib.ExitStack() as opened:
            opened.callback(listener.close)
            self._files = ForeignFiles()
            opened.callback(self._files.close)
            self.pools = Pools(plan.memory, owners, tenants, clock=lambda: clock_ns() / 1e9)
            opened.callback(self.pools.stop)
            self.channels = ControlChannels(
                ChannelSettings(
                    socket=plan.socket,
                    boot_id=self._boot_id,
                    mode=plan.mode,
                    group=plan.group,
                    tells_users=len(plan.domains) > 1,
                    remote=plan.remote,
                    limits=plan.connections,
                ),
                self,
                self._files,
            )
            opened.pop_all()
        self._record = MemoryRecord(listener.lock_file)
        self._express = ExpressChannels(boot_id=self._boot_id)
        open_pidfd = partial(os.pidfd_open, os.getpid())
        tiers = open_chains(plan.tiers, open_pidfd=open_pidfd)
        self._express.watch_stored(bool(tiers))
        self.peers = open_peer_links(plan.peering, open_pidfd=open_pidfd, clock=lambda: clock_ns() / 1e9)
        capabilities = CAPABILITIES - (set() if self.peers else {"peer"})
        self.core = ServerCore(
            CoreSettings(
                boot_id=self._boot_id,
                handshake=HandshakeSettings(capabilities=capabilities, domain="", software=f"kvoffload {__version__}"),
                control=self.channels.endpoint,
                pid=os.getpid(),
                uid=os.getuid(),
                operator_uids=plan.operator_uids,
                operator_token=plan.operator_token,
                limits=plan.limits,
            ),
            note_sharing(plan.domains, plan.mode),
            draw=lambda: secrets.randbits(32),
            on_heard=lambda is_wanted: self._express.watch_stored(is_wanted or bool(tiers)),
            tiers=tiers,
            links=self.peers,
            express=self._express,
            on_prompt=plan.on_prompt,
        )
        for socket in self.channels.sockets:
            self._poller.register(socket, zmq.POLLIN)
        peers = () if self.peers is None else (self.peers.fileno(),)
        for file in (self.channels.local_file, self._express.fileno(), *self.core.tiers.files(), *peers):
            self._poller.register(file, zmq.POLLIN)
        self._lifelines = Lifelines(
            listener,
            self,
            self,
            boot_id=self._boot_id,
            files=self._files,
            clock_s=lambda: self._clock_ns() / 1e9,
        )
        wait_s = plan.adopt_wait_s
        if wait_s is None:
            wait_s = 0.0 if self._record.is_new else ADOPT_WAIT_S
        self._adopt_until_ns = clock_ns() + int(wait_s * 1e9)
        self._life = None if plan.private is None else PrivateLife(plan.private, clock_ns())
        self._warnings = WarningFeed(lambda: self._clock_ns() / 1e9)
        self._warnings.start()

    @property
    def boot_id(self) -> int:
        return self._boot_id

    @property
    def remote_endpoint(self) -> str:
        """Address at which it listens over TCP; empty: it does not."""
        return self.channels.remote_endpoint

    @property
    def has_memory(self) -> bool:
        """Whether all domains have their first memory. Engines that came before it wait."""
        return len(self.pools.caches) == len(self._plan.memory)

    @property
    def _told_users(self) -> frozenset[int] | None:
        """Users who hear of warnings; None: all. If there are several domains, only operators hear of them, because a
        line may name users of another domain."""
        return None if len(self._plan.domains) == 1 else self._plan.operator_uids

    def stop(self) -> None:
        """Makes the server take nothing new, and end when no lease or reserved slot is held any more."""
        self._is_stopping = True

    @property
    def ready_bytes(self) -> int:
        """Number of bytes of memory that have their pages, in all domains."""
        return sum(cache.ready_bytes for cache in self.pools.caches.values())

    def run(self, after_turn: Callable[[], None] = lambda: None) -> None:
        """Serves until the server was stopped and drained, or ends by itself. Calls `after_turn` between turns. The
        process is the server's own: its threads switch as often as the loop needs it, and the kernel runs the loop soon
        after it wakes."""
        sys.setswitchinterval(SWITCH_S)
        native.take_short_turns()
        gc.collect()
        looked_ns = 0
        while self.turn(TICK_S):
            after_turn()
            if self._clock_ns() >= looked_ns + int(TICK_S * 1e9):
                looked_ns = self._clock_ns()
                find_garbage()

    def turn(self, timeout_s: float) -> bool:
        """Waits for something to do, and does it. False: the server ends, because it was stopped or drained and nothing
        is held any more, or because it is private and its last engine has gone.

        CacheMemoryError: there is no memory to serve.
        """
        self._take_memory()
        # An operator's drain ends nothing before the next turn, so that its answer goes out.
        is_draining = self._is_stopping or self.core.is_draining
        if is_draining:
            self._stopped_ns = self._stopped_ns or self._clock_ns()
            self.pools.stop_growing()
        if self._is_stopping:
            self._send(self.core.start_drain(self._clock_ns(), reason=ClosingReason.DRAINED))
        self._serve_ready(self._bound_wait(timeout_s if self.has_memory else min(timeout_s, TAKING_TICK_S)))
        self._send(self.core.advance(self._clock_ns()))
        if self._clock_ns() >= self._next_tick_ns:
            self._next_tick_ns = self._clock_ns() + int(TICK_S * 1e9)
            for part in (self.core, self.pools, self.channels, self._express, self.peers):
                if part is not None:
                    part.tick()
            self._send([*self._warnings.tell(self.core.sessions, only_users=self._told_users)])
            self._lifelines.tick(self._clock_ns() / 1e9)
            if self._life is not None:
                self._life.bound_log()
        self.core.tell_more()
        self._send_events()
        self._is_over = (is_draining and self._is_drained()) or self._ends_by_itself()
        return not self._is_over

    def close(self) -> None:
        """Closes everything. Memory stays for as long as engines have it mapped; if none has, blocks are handed over
        before."""
        self._is_stopping = True
        # They may offer its memory to the next server.
        is_held = any(session.processes and not session.is_observer for session in self.core.sessions)
        self._warnings.stop()
        self.pools.stop()
        self._lifelines.close()
        self._express.close()
        self.channels.close()
        if self.peers is not None:
            self.peers.close()
        for offered in self._offered.values():
            self._files.close_files(offered.uid, offered.files)
        self._files.close()
        until_ns = (self._stopped_ns or self._clock_ns()) + int(self._plan.hand_over_s * 1e9)
        hands_over = self._plan.hand_over_s > 0 and not is_held
        self.core.tiers.close(self._clock_ns, until_ns=until_ns if hands_over else None)
        self.pools.close()
        # The last of all: a successor makes files of the same names.
        self._listener.close(keeps_lock_file=is_held)
        if self._life is not None:
            self._life.close(is_clean=self._is_over)

    def _bound_wait(self, timeout_s: float) -> float:
        if self._watch_log_ns and self._clock_ns() >= self._watch_log_ns:
            self._watch_log_ns = 0
            if self._express.has_untold:
                self._take_stored()
            else:
                self.watch(self._express.fileno(), writes=False)
        if self.core.is_behind:
            return 0.0
        due_ns = min(filter(None, (self.core.tiers.next_ns(), self._watch_log_ns)), default=None)
        return timeout_s if due_ns is None else min(timeout_s, max(due_ns - self._clock_ns(), 0) / 1e9 + 0.001)

    def _serve_ready(self, timeout_s: float) -> bool:
        """Serves the descriptors that are ready. False: none was."""
        found = self._poller.poll(int(timeout_s * 1000))
        waiting: dict[int, int] = {}
        for ready, flags in found:
            if isinstance(ready, int) and ready == self.channels.local_file:
                self.channels.serve(ready, self.core, self._send, self._clock_ns)
            elif isinstance(ready, int) and ready == self.channels.long_file:
                self.channels.finish_long(self.core, self._send)
            elif isinstance(ready, int) and ready == self._express.fileno():
                self.unwatch(ready)
                self._take_stored()
            elif self.peers is not None and ready == self.peers.fileno():
                self.peers.tell(self.core, self._clock_ns())
            elif isinstance(ready, int):
                waiting[ready] = flags
            else:
                self.channels.serve(ready, self.core, self._send, self._clock_ns)
        for file in self._lifelines.choose(self.channels.choose(list(waiting))):
            reads, writes = bool(waiting[file] & ~zmq.POLLOUT), bool(waiting[file] & zmq.POLLOUT)
            if not self._lifelines.on_ready(file, reads=reads, writes=writes):
                self.channels.on_ready(file, reads=reads, writes=writes)
        return bool(found)

    def _take_stored(self) -> None:
        core = self.core
        self._express.take_stored(core.tell_stored, core.tiers.forget, core.feed.tell_lost)
        self._watch_log_ns = self._clock_ns() + LOG_PAUSE_NS

    def _is_drained(self) -> bool:
        has_untold = self._express.has_untold or (self.peers is not None and self.peers.has_untold)
        return not (self.channels.has_long or has_untold) and self.core.is_drained(self._clock_ns())

    def _ends_by_itself(self) -> bool:
        """Whether the server is private and ends now: no engine uses it, and none is about to connect. An engine that
        comes later is not let in, and starts another server."""
        life = self._life
        if life is None or not self._is_due(life) or not life.hold_start():
            return False
        for _ in range(LAST_LOOKS):
            if not self._serve_ready(0):
                break
        if self._lifelines.is_receiving or not self._is_due(life):
            life.free_start()
            return False
        logger.info("no process is connected any more, the server ends")
        return True

    def _is_due(self, life: PrivateLife) -> bool:
        # A session stays until all its processes have exited, or have parted. Observers are not waited for.
        is_used = any(not (session.is_observer or session.has_parted) for session in self.core.sessions)
        return life.is_due(self._clock_ns(), is_used=is_used)

    # ---- what lifelines ask of the loop, and tell ----

    def watch(self, file: int, *, writes: bool, reads: bool = True) -> None:
        self._poller.register(file, (zmq.POLLIN if reads else 0) | (zmq.POLLOUT if writes else 0))

    def unwatch(self, file: int) -> None:
        if file in self._poller:
            self._poller.unregister(file)

    def on_greeting(self, lifeline: int, call: Call, credentials: Credentials, pidfd: int | None) -> None:
        peer = Peer(pid=credentials.pid, uid=credentials.uid, gid=credentials.gid)
        owned = None if pidfd is None else ReceivedDescriptor(pidfd)
        # The rights of its channel are those of the session that it leaves.
        self._express.end(lifeline)
        self._send(self.core.greet(lifeline, call, peer, owned, self._clock_ns()))
        self._limit_growth()
        if self._life is not None:
            self._is_due(self._life)

    def wants_offer(self, lifeline: int, offer: Offer) -> bool:
        sessions = self.core.sessions
        session = sessions.find_lifeline(lifeline)
        # One process of the engine sends it.
        is_others = any(sessions.find_lifeline(other) is session for other in self._offered.keys() - {lifeline})
        return not is_others and self.core.is_offer_wanted(lifeline, offer.former_boot_id)

    def on_offer(self, lifeline: int, offer: Offer, descriptors: list[int]) -> None:
        session = self.core.sessions.find_lifeline(lifeline)
        if session is None or not self.wants_offer(lifeline, offer):
            self._files.close_files(NOBODY if session is None else session.uid, descriptors)
            return
        offered = self._offered.setdefault(lifeline, _Offered(session.uid))
        beside = 0 if offered.files else 2
        is_next = offer.first == len(offered.files) - (2 - beside)
        offered.files += descriptors
        is_whole = len(descriptors) == beside + len(offer.segment_sizes) // 8
        is_too_much = len(offered.files) - 2 > self.core.count_offered(lifeline) or any(map(is_of_reserve, descriptors))
        if not is_next or not is_whole or is_too_much or not all(map(native.is_memory_file, descriptors)):
            self._forget_offer(lifeline, AdoptVerdict.NOT_USABLE)
        elif offer.is_last:
            self._adopt(lifeline, offer.former_boot_id)

    def on_holding(self, lifeline: int, holding: Holding) -> None:
        self._send(self.core.hear_holding(lifeline, holding))
        self._limit_growth()

    def on_farewell(self, lifeline: int, farewell: Farewell) -> None:
        logger.debug("lifeline %d says farewell: %s", lifeline, farewell.reason.name)
        self._lifelines.end(lifeline)

    def on_end(self, lifeline: int) -> None:
        self._express.end(lifeline)
        self.core.close_lifeline(lifeline)
        self._limit_growth()
        offered = self._offered.pop(lifeline, None)
        if offered is not None:
            self._files.close_files(offered.uid, offered.files)

    # ---- memory ----

    def _take_memory(self) -> None:
        """Attaches the memory that has been taken. Begins to take it for domains that have none, once the time is over
        in which engines may offer an old server's."""
        for name in self.pools.take_ready():
            self._attach(name, 0)
        if self._clock_ns() >= self._adopt_until_ns and not self._is_stopping:
            self.pools.begin()

    def _limit_growth(self) -> None:
        """Limits how far pools grow by what engines still have of former servers."""
        for name in self._plan.memory:
            self.pools.limit(name, self.core.count_former(name, self.pools.memory_id(name)))

    def _attach(self, domain: str, adopted_boot_id: int) -> None:
        for lifeline in [lifeline for lifeline in self._offered if self._domain_of(lifeline) == domain]:
            # It did not end in time.
            late = self._offered.pop(lifeline)
            self._files.close_files(late.uid, late.files)
        if self.peers is not None:
            try:
                self.peers.attach(domain, self.pools.caches[domain], self.core.tiers.find_chain(domain))
            except Exception:
                logger.exception("peers are not served from the memory of domain %r", domain)
        try:
            self._record.add(domain, self._boot_id)
        except OSError as fault:
            logger.warning("the next server will not know its memory from another's: %s", fault.strerror)
        self._send(self.core.attach_memory(domain, self.pools.caches[domain], adopted_boot_id=adopted_boot_id))

    def _adopt(self, lifeline: int, former_boot_id: int) -> None:
        session = self.core.sessions.find_lifeline(lifeline)
        assert session is not None
        if not self._record.admits(session.domain.name, former_boot_id):
            logger.warning("memory of server %x is not adopted: it never was at %s", former_boot_id, self._plan.socket)
            self._forget_offer(lifeline, AdoptVerdict.NOT_USABLE)
            return
        verdict = self.pools.adopt(session.domain.name, self._offered.pop(lifeline).files, former_boot_id)
        if verdict is None:
            self._attach(session.domain.name, former_boot_id)
        else:
            self.core.refuse_offer(session, verdict)

    def _forget_offer(self, lifeline: int, verdict: AdoptVerdict) -> None:
        session = self.core.sessions.find_lifeline(lifeline)
        offered = self._offered.pop(lifeline)
        self._files.close_files(offered.uid, offered.files)
        if session is not None:
            self.core.refuse_offer(session, verdict)

    def _domain_of(self, lifeline: int) -> str | None:
        session = self.core.sessions.find_lifeline(lifeline)
        return None if session is None else session.domain.name

    # ---- messages ----

    def _send(self, messages: list[Sendable]) -> None:
        if self.core.is_draining:
            # No process may hear of the drain before its express channel refuses new calls.
            self._express.start_drain()
        for one in messages:
            if isinstance(one, ToConnection):
                if not self.channels.send(one.connection, one.message, one.number):
                    self.core.close_connection(one.connection)
            elif isinstance(one, Later):
                self.channels.start_long(one)
            elif isinstance(one, SendMemory):
                self._send_memory(one)
            elif isinstance(one, OpenExpress):
                self._open_express(one)
            elif one.number:
                self._lifelines.send_reply(one.lifeline, one.message, one.number)
            else:
                if isinstance(one.message, Quarantine):
                    self._express.end(one.lifeline)
                self._lifelines.send_event(one.lifeline, one.message)

    def _open_express(self, wanted: OpenExpress) -> None:
        end = self._express.open(wanted, self.pools.caches[wanted.space.domain].core)
        if end is None:
            refusal = Error(code=ErrorCode.BUSY, message="there are too many express channels", retryable=True)
            self._lifelines.send_event(wanted.lifeline, refusal)
        elif not self._lifelines.send_event(wanted.lifeline, Express(), (end,), taken=(end,)):
            self._express.end(wanted.lifeline)

    def _send_events(self) -> None:
        """Sends events to subscribers. Closes a connection that has too many frames unread, because no event may be
        lost without a gap in their numbers."""
        for connection in self.core.feed.ready():
            for event, number in self.core.feed.take(connection, EVENTS_AT_ONCE):
                if not self.channels.send(connection, event, number):
                    self.core.close_connection(connection)
                    break

    def _send_memory(self, wanted: SendMemory) -> None:
        cache = self.pools.caches[wanted.domain]
        session = self.core.sessions.find_lifeline(wanted.lifeline)
        if session is None or session.cache_session is None:
            return
        cache.note_user(session.uid)
        try:
            process = session.processes.get(wanted.lifeline)
            heeds = process is not None and process.heeds_shrinking
            index = cache.open_signed_index(session.cache_session, heeds=heeds)
        except (RuntimeError, ValueError) as fault:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("a process of user %d gets no memory, and is let go: %s", session.uid, fault)
            self._lifelines.end(wanted.lifeline)
            return
        self._has_warned = False
        files = cache.files
        sizes = [os.fstat(file).st_size for file in files.segments]
        for first in range(0, max(len(sizes), 1), MAX_PACKET_SEGMENTS):
            part = slice(first, first + MAX_PACKET_SEGMENTS)
            memory = Memory(
                index_bytes=os.fstat(files.index).st_size,
                segments=len(sizes),
                first=first,
                segment_sizes=np.array(sizes[part], "<u8").tobytes(),
                adopted_boot_id=wanted.adopted_boot_id,
            )
            beside, taken = ((files.lock, index), (index,)) if first == 0 else ((), ())
            self._lifelines.send_event(wanted.lifeline, memory, (*beside, *files.segments[part]), taken=taken)

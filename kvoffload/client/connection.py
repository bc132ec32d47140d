"""A process's connection to its server: link, sockets, their lock, and the thread that keeps the process served."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from kvoffload.client.block_calls import BlockCalls
from kvoffload.client.inventory import Heard
from kvoffload.client.lanes import LOOK_NS, Pending
from kvoffload.client.link import Link
from kvoffload.client.memories import Memories
from kvoffload.client.prompt_log import PromptLog
from kvoffload.client.settings import SECOND_NS, ClientSettings, LinkState
from kvoffload.client.wire import SocketWire
from kvoffload.errors import KVOffloadError
from kvoffload.protocol import Bye, Role

PARTING_S = 1.0
"""How long an end waits at most for the server to have had all that was sent."""
_THREAD_S = 0.2


class Connection:
    """Belongs to the process that made it, not to a forked child. Callers hold its lock while they use its parts.

    Without a server, its thread keeps trying to join one.
    """

    def __init__(
        self,
        settings: ClientSettings,
        *,
        on_event: Callable[[Heard, int], None] | None = None,
    ) -> None:
        self._settings = settings
        self.lock = threading.Lock()
        self.turned = threading.Condition(self.lock)
        """Notified by the thread after each turn in which the process is served."""
        self.wire = SocketWire(settings.socket if isinstance(settings.socket, Path) else None)
        self._pidfd = os.pidfd_open(os.getpid())
        self.link = Link(
            settings.member,
            settings.register,
            settings.link,
            self.wire,
            Memories(keeps_former=settings.member.role is Role.WORKER),
            pidfd=self._pidfd,
            random=Random(),
            on_event=on_event,
        )
        self.blocks = BlockCalls(self.link, settings.register, settings.link)
        self.prompts = None if settings.register is None else PromptLog(self.link, settings.register)
        """The outcomes of prompts that wait for the next message, or None for an observer."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._keep, name="kvoffload-client", daemon=True)
        self._is_closing = False
        self.hears_answers = False
        """Whether the thread receives answers on the control channel as soon as they come."""
        self.wire.on_unsent = self.wake

    def start(self) -> None:
        """Begins to join. Calling it again has no effect."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Gives back what is held, parts from the server and closes everything. Waits for 1.2 s at most. Calling it
        again has no effect."""
        with self.lock:
            if self._is_closing:
                return
            self._is_closing = True
        self.wake()
        if self._thread.ident is not None:
            # It may be starting a server; then it ends by itself.
            self._thread.join(_THREAD_S)
        with self.lock:
            if self._settings.register is not None:
                self.blocks.close(time.monotonic_ns())
            self._part()
            self.link.close()
            self.link.memories.close()
            self.wire.hang_up()
            os.close(self._pidfd)
        if not self._thread.is_alive():
            os.close(self._wake)

    @property
    def is_woken(self) -> bool:
        """Its thread was told to look, and has not looked yet."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        return bool(poller.poll(0))

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def look(self, now_ns: int) -> None:
        """Receives answers on a caller's thread, which holds the lock. It may hang up, but it never joins: the
        connection's own thread does that."""
        was_serving = self.link.state is LinkState.SERVING
        if was_serving and not self.wire.receive_answers(self.link, now_ns):
            # The lifeline may say why.
            self.wire.receive_all(self.link, now_ns)
        if self.link.state is LinkState.SERVING:
            self.link.on_time(now_ns)
        if was_serving and self.link.state is not LinkState.SERVING:
            self.wake()

    # ---- inside ----

    def _part(self) -> None:
        """Sees to it that everything sent arrives: the last messages are told apart from lost ones."""
        if self.link.state is not LinkState.SERVING:
            return
        now_ns = time.monotonic_ns()
        end_ns = now_ns + int(PARTING_S * SECOND_NS)
        # Late answers may bring leases and slots, which are given back; the server should receive that, too.
        while now_ns < end_ns and (pending := self.link.confirm(now_ns, end_ns - now_ns)) is not None:
            self._await(pending)
            now_ns = time.monotonic_ns()
        if now_ns < end_ns:
            self._await(self.link.ask(Bye(one_way_count=self.link.lanes.control.one_way), now_ns, end_ns - now_ns))

    def _await(self, pending: Pending) -> None:
        while not pending.is_over:
            self.wire.await_answers(0.001)
            now_ns = time.monotonic_ns()
            self.wire.receive_all(self.link, now_ns)
            self.link.on_time(now_ns)

    def _find_server(self) -> None:
        """Finds or starts a private server. The lock is not held meanwhile, since that can take seconds."""
        find = self._settings.socket
        with self.lock:
            now_ns = time.monotonic_ns()
            is_due = self.wire.path is None and self.link.is_dial_due(now_ns) and not self._is_closing
            holds_memory = self.link.memories.current is not None
        if isinstance(find, Path) or not is_due:
            return
        path, line = None, ""
        try:
            path = find(holds_memory)
        except KVOffloadError as fault:
            line = str(fault)
        with self.lock:
            self.wire.path = path
            if path is None:
                self.link.cannot_dial(time.monotonic_ns(), line)

    def _keep(self) -> None:
        """Joins a server, and joins again after each hang-up. Also handles what no caller waits for."""
        while True:
            self._find_server()
            with self.lock:
                if self._is_closing:
                    return
                now_ns = time.monotonic_ns()
                self.wire.receive_all(self.link, now_ns)
                if self.wire.path is not None:
                    self.link.on_time(now_ns)
                self.blocks.refill(now_ns)
                if self.prompts is not None:
                    self.prompts.send(now_ns, self._settings.link.call_ns)
                if self.link.is_serving:
                    self.turned.notify_all()
                hears_events = self.link.state is LinkState.SERVING and self.link.subscription is not None
                self.hears_answers = hears_events or self.link.lanes.awaits_control
                files = {self.wire.lifeline_file: select.POLLIN}
                if self.link.state is LinkState.JOINING or self.hears_answers:
                    files[self.wire.control_file] = select.POLLIN
                for file in self.wire.files_to_write:
                    files[file] = files.get(file, 0) | select.POLLOUT
                wait_s = (self.link.next_ns(now_ns) - now_ns) / SECOND_NS
                if self.link.state is LinkState.JOINING:
                    wait_s = min(wait_s, LOOK_NS / SECOND_NS)
            poller = select.poll()
            for file, flags in {**files, self._wake: select.POLLIN}.items():
                if file >= 0:
                    poller.register(file, flags)
            poller.poll(max(wait_s, 0) * 1000)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)

"""The way of an engine's processes to their cache server: which one, as whom, and what is refused at start."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvoffload.client import Client, ClientSettings, Heard, LinkSettings, LinkState, Member
from kvoffload.client.private_server import find_or_start
from kvoffload.config.sources import Settings
from kvoffload.cpus import engine_cpus, running_on
from kvoffload.errors import ServerError
from kvoffload.protocol import Register, Role

logger = logging.getLogger(__name__)

START_WAIT_S = 20.0
"""How long an engine's start waits for a server whose process is there to serve it, which takes a moment: memory is not
waited for. It is served later, if it has to be."""
ABSENT_WAIT_S = 1.0
"""The same for a server that is not there."""
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class CacheAccess:
    """Opens the cache for one engine."""

    settings: Settings
    engine: str
    """Its name, the same in all its processes."""
    machine_key: str
    """Name that is the same for all engines that share a private server: those of one data-parallel deployment."""
    engine_bytes: int = 0
    """Bytes that the engine caches itself, in all its processes together; 0: unknown."""

    def open(
        self,
        register: Register,
        *,
        role: Role,
        rank: int = 0,
        on_event: Callable[[Heard, int], None] | None = None,
        stock_slots: tuple[int, ...] = (),
        waits: bool = True,
    ) -> Client:
        """Joins, and returns when it is served, or when it will be served later. `stock_slots`: as in `LinkSettings`.
        Unless it `waits` it returns at once: the engine runs, and no step waits for a server.

        PrivateServerError, ConfigError: there can be no private server. ServerError: the server refuses this engine.
        """
        settings = self.settings
        socket: Path | Callable[[bool], Path] = Path(settings.server)
        if not settings.server:
            if waits:
                # The first time here, so that what keeps it from starting keeps the engine from starting.
                self._find_private(holds_memory=False)
            socket = lambda holds_memory: self._find_private(holds_memory=holds_memory)  # noqa: E731
        elif role is Role.SCHEDULER and settings.memory != Settings.model_fields["memory"].default:
            logger.info("`memory` of this engine is not used: the server at %s has a pool of its own", settings.server)
        client_settings = ClientSettings(
            socket=socket,
            member=Member(engine=self.engine, role=role, rank=rank, pid=os.getpid(), uid=os.getuid()),
            register=register,
            step_budget_s=settings.step_budget,
            link=LinkSettings(acquire_deadline_s=settings.acquire_deadline, stock_slots=stock_slots),
        )
        with running_on(engine_cpus()):
            client = Client(client_settings, on_event=on_event).start()
        if not waits:
            return client
        try:
            self._await(client, role)
        except BaseException:
            client.close()
            raise
        return client

    def start_private(self) -> None:
        """There is a private server from here on, if this engine is to have one. May take a second. Errors are those of
        `open`, which meets them again."""
        if not self.settings.server:
            self._find_private(holds_memory=False)

    def _await(self, client: Client, role: Role) -> None:
        now_s = time.monotonic()
        absent_s, end_s = now_s + ABSENT_WAIT_S, now_s + START_WAIT_S
        while not client.wait_until_served(_LOOK_S):
            if client.link.refusal is not None:
                raise ServerError(
                    f"the cache server at {self.settings.server or 'its private socket'}: {client.fault}",
                    remedy="start the engine with the same settings as the server's others, or give it another server",
                )
            now_s = time.monotonic()
            # A private server was there a moment ago, and is started again if it ended: what it has is no time yet.
            is_absent = bool(self.settings.server) and client.link.state is LinkState.DOWN and client.fault
            if now_s > end_s or (now_s > absent_s and is_absent):
                # Its ranks have the same server: one of its processes says so.
                level = logging.WARNING if role is Role.SCHEDULER else logging.DEBUG
                logger.log(level, "the engine starts without a cache server until there is one: %s", client.fault)
                return

    def _find_private(self, *, holds_memory: bool) -> Path:
        # A server that lingers serves any later engine with the same settings.
        key = "" if self.settings.linger else self.machine_key
        return find_or_start(
            self.settings,
            Path(tempfile.gettempdir()),
            key=key,
            holds_memory=holds_memory,
            engine_bytes=self.engine_bytes,
        )

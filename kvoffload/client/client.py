"""A process's connection to its cache server, for threads: look-ups in mapped memory, messages for all else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from random import Random
from types import TracebackType
from typing import Self

from typing_extensions import Buffer

from kvoffload.cache import AcquiredBlocks, Ask, CacheStats, ReservedSlots
from kvoffload.client.block_calls import PendingAcquire, TierWait
from kvoffload.client.client_calls import ClientCalls
from kvoffload.client.connection import Connection
from kvoffload.client.insight import ServerInsight, expect, read_found, read_insight, read_stats
from kvoffload.client.inventory import Heard
from kvoffload.client.lanes import Backoff
from kvoffload.client.settings import SECOND_NS, ClientSettings
from kvoffload.protocol import Clear, ClearedBlocks, Done, Drain, Draining, Inspect, ServerMessage, SetQuota, Stats
from kvoffload.protocol.message import Reply, Request

_SLICE_S = 0.001
"""How long a waiting call sleeps at most before it looks again."""
_RETURN_NS = 400_000
"""Part of a step's budget that is kept for the return from a wait."""
_LOOK_S = 0.0002
"""The end of a step's budget, in which a wait looks and does not sleep: a sleep would end when the system lets it."""
_LATE_NS = 2_000_000
"""A wait that ends so long after the step's budget shows that this thread does not get a processor when it wakes."""


class Client(ClientCalls):
    """Safe to call from any thread of the process that made it; not in a forked child.

    A call whose docstring says that it waits does so within a bound, and never beyond what is left of the step's budget
    between two `begin_step`. All other calls only send, and do not wait.
    """

    def __init__(self, settings: ClientSettings, *, on_event: Callable[[Heard, int], None] | None = None) -> None:
        """`on_event` hears of the events of a subscription, mostly on the client's own thread; it must not call the
        client, which waits for it."""
        super().__init__(settings, Connection(settings, on_event=on_event))
        budget_ns = int(settings.step_budget_s * SECOND_NS)
        self._step_ns = max(budget_ns - _RETURN_NS, budget_ns // 2)
        self.budget_ns = -1
        """Nanoseconds left of the step's budget; -1: there are no steps."""
        self._waits_again_ns = 0
        """From when on `wait_for` waits again, after a wait that ended late."""
        self._pauses = Backoff(SECOND_NS, 16 * SECOND_NS, Random())

    def start(self) -> Self:
        """Begins to join. Only `wait_until_served` waits until that is done."""
        self.connection.start()
        return self

    def close(self) -> None:
        """Gives back what is held and parts from the server: no copy runs any more. Waits for 1.2 s at most."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_served(self, timeout_s: float) -> bool:
        """Waits until it is served. False: it is not by then, and `fault` says why."""
        with self.connection.turned:
            return self.connection.turned.wait_for(lambda: self.link.is_serving, timeout_s)

    # ---- loads and saves ----

    def begin_step(self) -> None:
        """Starts a new step: the calls that follow share a full budget for waiting."""
        self.budget_ns = self._step_ns

    def wait_for(self, pending: PendingAcquire) -> AcquiredBlocks | None:
        """Does the same as `poll`, but waits: for what is left of the step's budget at most. While the server is late,
        and for some seconds after a wait that took too long because the machine is busy, it does not wait."""
        if pending.found is None and self.link.is_prompt and time.monotonic_ns() >= self._waits_again_ns:
            self._wait(lambda: self.poll(pending) is not None)
        return pending.found

    def acquire(self, ask: Ask, *, far: TierWait | None = None) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most, and before that for slower tiers if they are wanted."""
        return self._finish(self.start_acquire(ask, far=far))

    def acquire_entries(self, group: int, hashes: Buffer, *, shards: Sequence[int] = ()) -> AcquiredBlocks:
        """Waits, for the acquire deadline at most."""
        with self.lock:
            pending = self.blocks.start_acquire_entries(
                group, hashes, time.monotonic_ns(), self.settings.link.acquire_ns, shards=shards
            )
        return self._finish(pending)

    def reserve(self, group: int, *, count: int = 0, hashes: Buffer | None = None) -> ReservedSlots:
        """Waits, for the call deadline at most."""
        with self.lock:
            pending = self.blocks.start_reserve(group, time.monotonic_ns(), count=count, hashes=hashes)
        self._wait(lambda: pending.is_over)
        return pending.slots

    # ---- administration ----

    def stats(self) -> CacheStats:
        """Returns the server's counts, with all that was told before. Waits, for the call deadline at most.
        ServerError: there is no answer."""
        confirmed = self.connection.confirm()
        self._wait(lambda: confirmed is None or confirmed.is_over)
        return read_stats(self._ask(Stats()))

    def insight(self) -> ServerInsight:
        """Returns the outcomes of prompts and the timings of calls. Waits like `stats`."""
        return read_insight(self._ask(Inspect()))

    def clear(self, *, token: str = "") -> int:
        """Makes the memory forget all blocks and returns how many there were. Waits like `stats`; ServerError: it
        refuses."""
        return expect(self._ask(Clear(token=token)), ClearedBlocks, "clear").blocks

    def set_quota(self, tenant: str, quota_bytes: int, *, token: str = "") -> None:
        """Sets a tenant's quota until the server ends. Waits like `stats`; ServerError: it refuses."""
        message = SetQuota(tenant=tenant, quota_bytes=quota_bytes, token=token)
        expect(self._ask(message), Done, "quota")

    def look_into(self, message: Request) -> Reply:
        """Asks a question of `kvoffload.protocol.survey` for its reply. Waits like `stats`; ServerError: it refuses."""
        return read_found(message, self._ask(message))

    def drain(self, *, token: str = "", deadline_ms: int = 0) -> Draining:
        """The server takes nothing new and ends. Waits like `stats`; ServerError: it refuses."""
        return expect(self._ask(Drain(token=token, deadline_ms=deadline_ms)), Draining, "drain")

    # ---- inside ----

    def _finish(self, pending: PendingAcquire) -> AcquiredBlocks:
        self._wait(lambda: self.poll(pending) is not None)
        if pending.found is None:
            # The step's budget is spent.
            self.cancel(pending)
        assert pending.found is not None
        return pending.found

    def _ask(self, message: Request) -> ServerMessage | None:
        pending = self.connection.ask(message)
        self._wait(lambda: pending.is_over)
        if not pending.is_over:
            pending.is_wanted = False
        return pending.answer

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Waits until the call is over, at its deadline at the latest, or until the step's budget is spent."""
        start_ns = now_ns = time.monotonic_ns()
        budget_ns = self.budget_ns
        while not is_over() and (budget_ns < 0 or now_ns - start_ns < budget_ns):
            # The link ends unanswered calls at their deadlines, so an interrupted or useless sleep does no harm.
            left_s = _SLICE_S if budget_ns < 0 else (budget_ns - (now_ns - start_ns)) / SECOND_NS
            if left_s > _LOOK_S and budget_ns >= 0:
                left_s -= _LOOK_S
            self.wire.await_answers(min(left_s, _SLICE_S), with_control=self.link.lanes.awaits_control)
            now_ns = time.monotonic_ns()
            with self.lock:
                self.connection.look(now_ns)
        if budget_ns >= 0:
            left_ns = budget_ns - (now_ns - start_ns)
            self.budget_ns = max(left_ns, 0)
            if left_ns > -_LATE_NS:
                self._pauses.reset()
            else:
                self._waits_again_ns = now_ns + self._pauses.next_ns()

"""A fleet that serves a trace: an event loop over arrivals, loads, prefills, writes, and nodes that fail and join."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable

import numpy as np

from benchmarks.fleets.costs import Costs
from benchmarks.fleets.node import NOBODY, Node, Request, flags
from benchmarks.fleets.remotes import Found, Homes, NoRemote, Part, Peers, Remote, SharedStore
from benchmarks.fleets.settings import Fleet, Kind, Routing, Tally
from benchmarks.fleets.wire import Wire
from benchmarks.fleets.workload import Blocks, Workload
from kvoffload import native


class FleetRun:
    """One run. Everything follows from the workload and the fleet: nothing is drawn at random."""

    def __init__(self, work: Workload, fleet: Fleet, costs: Costs) -> None:
        self._work, self.settings, self._costs = work, fleet, costs
        self._place = costs.places[fleet.place]
        self._block_bytes = work.block_tokens * costs.model.kv_bytes_per_token
        self._clock = itertools.count()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._turn = 0
        own = fleet.memory_blocks - self._set_aside()
        pool = self._make(fleet.policy, fleet.nodes * fleet.memory_blocks) if fleet.kind is Kind.POOL else None
        self.nodes = [
            Node(
                number=number,
                engine=self._make("lru", fleet.engine_blocks),
                memory=pool or self._make(fleet.policy, own),
                link_in=Wire(self._place.node_bytes_per_s),
                link_out=Wire(self._place.node_bytes_per_s),
            )
            for number in range(fleet.nodes)
        ]
        self.remote = self._make_remote()
        count = len(work.blocks)
        self.tally = Tally(
            ttft_s=np.full(count, np.nan),
            engine_hits=np.zeros(count, np.int64),
            memory_hits=np.zeros(count, np.int64),
            remote_hits=np.zeros(count, np.int64),
            references=sum(map(len, work.blocks)),
        )
        computing_s = sum(costs.model.prefill_s(0, int(tokens)) for tokens in work.tokens)
        self._end_s = computing_s / (fleet.nodes * fleet.load)
        self._times_s = work.times_s * (self._end_s / max(work.times_s[-1], 1e-9))

    def run(self) -> Tally:
        for share, number in self.settings.fails:
            self._at(share * self._end_s, lambda now_s, number=number: self._fail(now_s, number))
        for share, number in self.settings.joins:
            self._at(share * self._end_s, lambda now_s, number=number: self._join(number))
        arrivals = (
            (float(time_s), Request(number, float(time_s), self._work.blocks[number], int(self._work.tokens[number])))
            for number, time_s in enumerate(self._times_s)
        )
        upcoming = next(arrivals, None)
        while upcoming is not None or self._events:
            # Earlier events come first, so that wires see times that do not fall.
            if self._events and (upcoming is None or self._events[0][0] <= upcoming[0]):
                now_s, _, act = heapq.heappop(self._events)
                act(now_s)
                self.tally.duration_s = max(self.tally.duration_s, now_s)
            elif upcoming is not None:
                self._arrive(*upcoming)
                upcoming = next(arrivals, None)
        self.tally.served_bytes = [node.link_out.read_bytes for node in self.nodes]
        memories = self.remote.memories if isinstance(self.remote, Homes) else [node.memory for node in self.nodes]
        self.tally.held_blocks = [memory.used_blocks for memory in memories]
        return self.tally

    # ---- making ----

    def _make(self, policy: str, blocks: int) -> native.ReplayMemory:
        return native.ReplayMemory(self._work.trace, policy, blocks)

    def _set_aside(self) -> int:
        fleet = self.settings
        if fleet.kind is not Kind.HOMES or fleet.home_share is None:
            return 0
        return round(fleet.memory_blocks * fleet.home_share)

    def _make_remote(self) -> Remote:
        fleet = self.settings
        if fleet.kind is Kind.STORE:
            return SharedStore(self._make("lru", fleet.store_blocks), self._place.place_bytes_per_s)
        if fleet.kind is Kind.PEERS:
            return Peers(self.nodes)
        if fleet.kind is Kind.HOMES:
            list_starts = self._work.list_hash_starts if fleet.cuts_by_hash else self._work.list_run_starts
            return Homes(self._work, self.nodes, self._list_homes(), list_starts(fleet.run_blocks))
        return NoRemote()

    def _list_homes(self) -> list[native.ReplayMemory]:
        if self.settings.home_share is None:
            return [node.memory for node in self.nodes]
        return [self._make(self.settings.home_policy, self._set_aside()) for _ in self.nodes]

    def _at(self, time_s: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._clock), act))

    # ---- a request's way ----

    def _arrive(self, now_s: float, request: Request) -> None:
        node = self._choose(now_s, request)
        request.epoch = node.epoch
        node.requests[request.number] = request
        blocks = request.blocks
        request.engine_end, request.memory_end = node.find_local(blocks)
        node.engine.touch(blocks[: request.engine_end])
        node.memory.touch(blocks[request.engine_end : request.memory_end])
        request.remote_end = request.memory_end
        ready_s = now_s
        if request.memory_end < len(blocks):
            ready_s = self._look(now_s, node, request)
        if self.settings.tells_uses:
            self.remote.use(blocks[: request.remote_end])
        loaded = request.remote_end - request.engine_end
        if loaded:
            ready_s += self._costs.memory_latency_s + loaded * self._block_bytes / self._costs.memory_bytes_per_s
        node.expected_s = max(node.expected_s, ready_s) + self._prefill_s(request)
        self._at(ready_s, lambda then_s: self._start(then_s, node, request))

    def _look(self, now_s: float, node: Node, request: Request) -> float:
        """Asks the remote for the rest, and reads it if that is worth it. When the answer is there."""
        rest = request.blocks[request.memory_end :]
        local = flags(node.memory, rest)
        found = self.remote.look(node, rest, local)
        self.tally.questions += found.questions
        asked_s = now_s + (self._place.latency_s if found.questions else 0.0)
        if not found.count:
            return asked_s
        begin = request.memory_end * self._work.block_tokens
        worth_s = self._costs.model.prefill_s(begin, begin + found.count * self._work.block_tokens)
        if self._expect_s(now_s, node, found.parts) > worth_s:
            self.tally.too_slow_blocks += sum(len(part.blocks) for part in found.parts)
            return asked_s
        found = self._cut_late(now_s, node, rest, found)
        size_bytes = self._count_bytes(found.parts)
        ready_s = asked_s
        for part in found.parts:
            part.memory.touch(part.blocks)
            if part.wire is not None:
                sent_s = part.wire.read(now_s, len(part.blocks) * self._block_bytes)
                ready_s = max(ready_s, sent_s + 2 * self._place.latency_s)
                self.tally.batches += 1
        if size_bytes:
            ready_s = max(ready_s, node.link_in.read(now_s, size_bytes) + 2 * self._place.latency_s)
            self.tally.read_bytes += size_bytes
        request.remote_end += found.count
        node.memory.admit(request.blocks[: request.remote_end], request.blocks[: request.memory_end])
        return ready_s

    def _cut_late(self, now_s: float, node: Node, rest: Blocks, found: Found) -> Found:
        """Cuts off the blocks that would come after the deadline: reads come in the order of the prompt."""
        while found.count and (wait_s := self._expect_s(now_s, node, found.parts)) > self._costs.deadline_s:
            count = min(int(found.count * self._costs.deadline_s / wait_s), found.count - 1)
            kept = [part.blocks[np.isin(part.blocks, rest[:count])] for part in found.parts]
            self.tally.too_slow_blocks += sum(len(part.blocks) for part in found.parts) - sum(map(len, kept))
            parts = [
                Part(part.memory, part.wire, blocks)
                for part, blocks in zip(found.parts, kept, strict=True)
                if len(blocks)
            ]
            found = Found(count, parts, found.questions)
        return found

    def _expect_s(self, now_s: float, node: Node, parts: list[Part]) -> float:
        """How long all of these take from now on; 0 if none is on the network."""
        ends_s = [
            part.wire.expect_read(now_s, len(part.blocks) * self._block_bytes)
            for part in parts
            if part.wire is not None
        ]
        if not ends_s:
            return 0.0
        end_s = max(node.link_in.expect_read(now_s, self._count_bytes(parts)), *ends_s)
        return end_s + 2 * self._place.latency_s - now_s

    def _count_bytes(self, parts: list[Part]) -> int:
        return sum(len(part.blocks) for part in parts if part.wire is not None) * self._block_bytes

    def _prefill_s(self, request: Request) -> float:
        """Returns the seconds of computing a request's rest, which is at least one token."""
        begin = min(request.remote_end * self._work.block_tokens, request.tokens - 1)
        return self._costs.model.prefill_s(max(begin, 0), max(request.tokens, 1))

    def _start(self, now_s: float, node: Node, request: Request) -> None:
        if request.epoch != node.epoch:
            return
        prefill_s = self._prefill_s(request)
        self.tally.prefill_s += prefill_s
        node.free_s = max(now_s, node.free_s) + prefill_s
        self._at(node.free_s, lambda then_s: self._finish(then_s, node, request))

    def _finish(self, now_s: float, node: Node, request: Request) -> None:
        if request.epoch != node.epoch:
            return
        del node.requests[request.number]
        tally, blocks = self.tally, request.blocks
        tally.completed += 1
        tally.ttft_s[request.number] = now_s - request.arrival_s
        tally.engine_hits[request.number] = request.engine_end
        tally.memory_hits[request.number] = request.memory_end - request.engine_end
        tally.remote_hits[request.number] = request.remote_end - request.memory_end
        node.engine.admit(blocks, NOBODY)
        node.memory.admit(blocks, blocks[: request.remote_end])
        for part in self.remote.targets(node, blocks[request.remote_end :]):
            self._write(now_s, node, part)

    def _write(self, now_s: float, node: Node, part: Part) -> None:
        """Behind what is under way; what would come too late is not written at all."""
        if part.wire is None:
            part.memory.admit(part.blocks, NOBODY)
            return
        if max(node.link_out.behind_s(now_s), part.wire.behind_s(now_s)) > self._costs.queue_s:
            self.tally.dropped_blocks += len(part.blocks)
            return
        size_bytes = len(part.blocks) * self._block_bytes
        end_s = max(node.link_out.write(now_s, size_bytes), part.wire.write(now_s, size_bytes))
        self.tally.written_bytes += size_bytes
        self.tally.batches += 1
        # A memory that is gone by then belongs to no node.
        self._at(end_s + self._place.latency_s, lambda _: self._take(part.memory, part.blocks))

    def _take(self, memory: native.ReplayMemory, blocks: Blocks) -> None:
        memory.admit(blocks, NOBODY)

    # ---- which node ----

    def _choose(self, now_s: float, request: Request) -> Node:
        up = [node for node in self.nodes if node.is_up]
        if self.settings.routing is Routing.ROUND_ROBIN:
            self._turn += 1
            return up[self._turn % len(up)]
        if self.settings.routing is Routing.LEAST_LOADED:
            # Ties go round, or the first nodes of an idle fleet would have it all.
            self._turn += 1
            return min(
                up, key=lambda node: (max(node.expected_s - now_s, 0.0), (node.number - self._turn) % len(self.nodes))
            )
        self._turn += 1
        best, best_s = up[0], math.inf
        for at in range(len(up)):
            node = up[(at + self._turn) % len(up)]
            wait_s = max(node.expected_s - now_s, 0.0)
            if wait_s >= best_s:
                continue
            begin = node.find_local(request.blocks)[1] * self._work.block_tokens
            end_s = wait_s + self._costs.model.prefill_s(min(begin, request.tokens), request.tokens)
            if end_s < best_s:
                best, best_s = node, end_s
        return best

    # ---- nodes that go and come ----

    def _fail(self, now_s: float, number: int) -> None:
        """All it had is gone; its requests begin again elsewhere."""
        node = self.nodes[number]
        self.tally.lost_blocks += self._count_lost(node)
        node.is_up, node.epoch = False, node.epoch + 1
        fleet = self.settings
        node.engine = self._make("lru", fleet.engine_blocks)
        if fleet.kind is not Kind.POOL:
            node.memory = self._make(fleet.policy, fleet.memory_blocks - self._set_aside())
        if isinstance(self.remote, Homes):
            fresh = node.memory if fleet.home_share is None else self._make(fleet.home_policy, self._set_aside())
            self.remote.memories[number] = fresh
        self.remote.change(self.nodes)
        again, node.requests = list(node.requests.values()), {}
        for request in again:
            self.tally.rerouted += 1
            self._arrive(now_s, request)

    def _count_lost(self, node: Node) -> int:
        if self.settings.kind is Kind.POOL:
            return 0
        if isinstance(self.remote, Homes) and self.settings.home_share is not None:
            return node.memory.used_blocks + self.remote.memories[node.number].used_blocks
        return node.memory.used_blocks

    def _join(self, number: int) -> None:
        node = self.nodes[number]
        node.is_up = True
        node.free_s = node.expected_s = 0.0
        self.remote.change(self.nodes)

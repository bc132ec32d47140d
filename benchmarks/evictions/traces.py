"""Requests as lists of block ids, made from a seed: a class for each kind of traffic, with its parameters.

An id is a block by itself: equal ids stand behind equal ids. All sizes are in blocks and all times in steps; a step is
as long as one request takes in the mean.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

Request = tuple[int, ...]
Trace = list[Request]


def describe(requests: Trace) -> str:
    """How much a trace asks for, in words."""
    uses = Counter(block for request in requests for block in request)
    once = sum(count == 1 for count in uses.values())
    return f"{len(requests):,} requests, {uses.total():,} uses of {len(uses):,} blocks, {once:,} of them once"


@dataclass
class Blocks:
    """Gives out new ids."""

    next_id: Iterator[int] = field(default_factory=count)

    def make(self, blocks: int) -> Request:
        """Returns a run of blocks that no request has had."""
        return tuple(next(self.next_id) for _ in range(blocks))


def _geometric(rng: random.Random, mean: float) -> int:
    """Draws a whole number of at least 1."""
    return 1 + int(rng.expovariate(1 / max(mean - 1, 1e-9))) if mean > 1 else 1


def _zipf(rng: random.Random, items: int, exponent: float) -> Callable[[], int]:
    weights = [1 / (rank + 1) ** exponent for rank in range(items)]
    order = list(range(items))
    rng.shuffle(order)
    return lambda: rng.choices(order, weights)[0]


def _play(rng: random.Random, requests: int, start: Callable[[], Iterator[tuple[float, Request]]]) -> Trace:
    """Sessions side by side: each yields how long it waits and what it then asks for."""
    trace: Trace = []
    numbers = count()
    waiting: list[tuple[float, int, Request, Iterator[tuple[float, Request]]]] = []
    now = 0.0

    def go_on(session: Iterator[tuple[float, Request]], at: float) -> None:
        following = next(session, None)
        if following is not None:
            heapq.heappush(waiting, (at + following[0], next(numbers), following[1], session))

    pace = 1.0
    begun = 0
    while len(trace) < requests:
        # So many begin that the requests come one a step, in the mean.
        while not waiting or waiting[0][0] > now:
            begun += 1
            go_on(start(), now)
            pace = max(len(trace), 1) / begun
            now += rng.expovariate(1 / max(pace, 1.0))
        at, _, request, session = heapq.heappop(waiting)
        trace.append(request)
        go_on(session, at)
    return trace


@dataclass(frozen=True, kw_only=True)
class Chat:
    """Conversations that go on after a while, behind one of a few system prompts."""

    requests: int = 4000
    systems: int = 12
    system_blocks: int = 4
    turns: float = 4.0
    turn_blocks: float = 3.0
    pause: float = 150.0

    def make(self, seed: int) -> Trace:
        rng, blocks = random.Random(seed), Blocks()
        systems = [blocks.make(_geometric(rng, self.system_blocks)) for _ in range(self.systems)]
        draw = _zipf(rng, self.systems, 1.0)

        def session() -> Iterator[tuple[float, Request]]:
            prompt = systems[draw()]
            for turn in range(_geometric(rng, self.turns)):
                prompt += blocks.make(_geometric(rng, self.turn_blocks))
                yield (rng.expovariate(1 / self.pause) if turn else 0.0), prompt

        return _play(rng, self.requests, session)


@dataclass(frozen=True, kw_only=True)
class Agents:
    """Tasks of many quick steps, each with all that came before, behind long tool descriptions; then never again."""

    requests: int = 4000
    tools: int = 6
    tool_blocks: int = 16
    steps: float = 15.0
    step_blocks: float = 1.5
    pause: float = 12.0

    def make(self, seed: int) -> Trace:
        rng, blocks = random.Random(seed), Blocks()
        tools = [blocks.make(_geometric(rng, self.tool_blocks)) for _ in range(self.tools)]
        draw = _zipf(rng, self.tools, 1.0)

        def session() -> Iterator[tuple[float, Request]]:
            prompt = tools[draw()] + blocks.make(_geometric(rng, 4.0))
            for step in range(_geometric(rng, self.steps)):
                prompt += blocks.make(_geometric(rng, self.step_blocks))
                yield (rng.expovariate(1 / self.pause) if step else 0.0), prompt

        return _play(rng, self.requests, session)


@dataclass(frozen=True, kw_only=True)
class Retrieval:
    """Questions about documents, some asked about often: a document first, then a question of its own."""

    requests: int = 4000
    documents: int = 1500
    document_blocks: float = 20.0
    exponent: float = 0.9
    question_blocks: float = 2.0

    def make(self, seed: int) -> Trace:
        rng, blocks = random.Random(seed), Blocks()
        documents = [blocks.make(_geometric(rng, self.document_blocks)) for _ in range(self.documents)]
        draw = _zipf(rng, self.documents, self.exponent)
        return [documents[draw()] + blocks.make(_geometric(rng, self.question_blocks)) for _ in range(self.requests)]


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Each document has a few questions, at any time in the trace; more than half of the blocks are seen once."""

    requests: int = 3993
    documents: int = 740
    document_blocks: float = 25.5
    own_blocks: float = 6.4

    def make(self, seed: int) -> Trace:
        rng, blocks = random.Random(seed), Blocks()
        documents = [blocks.make(_geometric(rng, self.document_blocks)) for _ in range(self.documents)]
        weights = [rng.lognormvariate(0.0, 0.3) for _ in documents]
        asked = rng.choices(documents, weights, k=self.requests)
        return [document + blocks.make(_geometric(rng, self.own_blocks)) for document in asked]


@dataclass(frozen=True, kw_only=True)
class Scans:
    """Conversations, and from time to time a row of long prompts that do not come again."""

    requests: int = 4000
    every: int = 400
    scanned: int = 60
    scan_blocks: float = 40.0

    def make(self, seed: int) -> Trace:
        rng, blocks = random.Random(seed), Blocks(count(1 << 40))
        trace: Trace = []
        for number, request in enumerate(Chat(requests=self.requests).make(seed)):
            if number % self.every == self.every - 1:
                trace += [blocks.make(_geometric(rng, self.scan_blocks)) for _ in range(self.scanned)]
            trace.append(request)
        return trace


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Jobs, a few at a time: a template, and for each item one request with something of its own behind it."""

    requests: int = 4000
    jobs: int = 4
    items: float = 80.0
    template_blocks: float = 30.0
    item_blocks: float = 10.0

    def make(self, seed: int) -> Trace:
        rng, blocks = random.Random(seed), Blocks()

        def session() -> Iterator[tuple[float, Request]]:
            template = blocks.make(_geometric(rng, self.template_blocks))
            for item in range(_geometric(rng, self.items)):
                wait = rng.expovariate(1 / self.jobs) if item else 0.0
                yield wait, template + blocks.make(_geometric(rng, self.item_blocks))

        return _play(rng, self.requests, session)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The same prompts round and round, more than any memory holds."""

    prompts: int = 600
    prompt_blocks: float = 20.0
    rounds: int = 6

    def make(self, seed: int) -> Trace:
        rng, blocks = random.Random(seed), Blocks()
        prompts = [blocks.make(_geometric(rng, self.prompt_blocks)) for _ in range(self.prompts)]
        return prompts * self.rounds


@dataclass(frozen=True, kw_only=True)
class Shift:
    """One kind of traffic, and from half-way on another one."""

    first: Chat | Retrieval = field(default_factory=lambda: Retrieval(requests=3000))
    second: Agents | Chat = field(default_factory=lambda: Chat(requests=3000))

    def make(self, seed: int) -> Trace:
        apart = 1 << 40
        return self.first.make(seed) + [tuple(block + apart for block in request) for request in self.second.make(seed)]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Conversations, agents, questions and batch jobs together."""

    requests: int = 1500

    def make(self, seed: int) -> Trace:
        rng = random.Random(seed)
        kinds = (Chat, Agents, Retrieval, Batches)
        traces = [
            [tuple(block + (number << 40) for block in request) for request in kind(requests=self.requests).make(seed)]
            for number, kind in enumerate(kinds)
        ]
        turns = [number for number in range(len(kinds)) for _ in range(self.requests)]
        rng.shuffle(turns)
        left = [iter(trace) for trace in traces]
        return [next(left[number]) for number in turns]


GENERATED: dict[str, Callable[[int], Trace]] = {
    "chat": Chat().make,
    "agents": Agents().make,
    "retrieval": Retrieval().make,
    "questions": Questions().make,
    "scans": Scans().make,
    "batches": Batches().make,
    "shift": Shift().make,
    "loop": Loop().make,
    "mix": Mix().make,
}
"""Each name stands for what makes a trace from a seed."""

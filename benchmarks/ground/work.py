"""The requests of an engine, with their tokens and the answers that they will get, all made from seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest, read_trace

VOCABULARY = 100_000
"""Tokens are below this, which every model here knows."""
CONVERSATIONS_SEED = 28


@dataclass(eq=False)
class Ask:
    """One request. `answer`: one token for each that is wanted."""

    name: str
    prompt: list[int]
    answer: list[int]
    arrival_s: float = 0.0
    after: Ask | None = field(default=None, repr=False)
    """The turn before; this one arrives so long after it has ended."""
    wishes: Mapping[str, Any] | None = field(default=None, repr=False)
    """It asks this of the connector, in `kv_transfer_params`."""

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)


def make_tokens(seed: int, count: int) -> list[int]:
    """The same for the same seed; those of different seeds share no block."""
    chance = np.random.default_rng(seed)
    return chance.integers(1, VOCABULARY, count, dtype=np.int64).tolist()


def make_fresh(count: int, *, tokens: int, new_tokens: int, per_s: float, seed: int = 1) -> list[Ask]:
    """Nothing is reused. `per_s`: arrivals; 0: all at once."""
    chance = random.Random(seed)
    asks, now_s = [], 0.0
    for number in range(count):
        prompt = make_tokens(seed * 1_000_003 + number, tokens)
        answer = make_tokens(seed * 2_000_003 + number, new_tokens)
        asks.append(Ask(f"fresh-{seed}-{number}", prompt, answer, now_s))
        now_s += chance.expovariate(per_s) if per_s else 0.0
    return asks


def repeat(asks: Sequence[Ask], *, from_s: float, new_tokens: int, name: str = "again") -> list[Ask]:
    """The same prompts once more, with their answers behind them, in another order."""
    chance = random.Random(len(asks))
    chosen = list(asks)
    chance.shuffle(chosen)
    end_s = max((ask.arrival_s for ask in asks), default=0.0)
    arrivals = sorted(chance.uniform(0, end_s) for _ in chosen)
    return [
        Ask(
            f"{name}-{ask.name}",
            ask.prompt + ask.answer + make_tokens(hash_name(ask.name), 64),
            make_tokens(hash_name(ask.name) + 1, new_tokens),
            from_s + at_s,
        )
        for ask, at_s in zip(chosen, arrivals, strict=True)
    ]


def make_sharing(count: int, *, seed: int, tokens: int = 32_000) -> list[Ask]:
    """Prompts that begin with the same `tokens`, whatever the seed; each ends with 16 of its own. All come at once."""
    prefix = make_tokens(tokens, tokens)
    return [
        Ask(
            f"sharing-{seed}-{number}",
            prefix + make_tokens(seed * 3_000_017 + number, 16),
            make_tokens(seed * 5_000_011 + number, 8),
        )
        for number in range(count)
    ]


def hash_name(name: str) -> int:
    """The same in every process."""
    return int.from_bytes(name.encode()[-7:], "little")


def make_agents(
    count: int, *, turns: int, first_tokens: int, tool_tokens: int, new_tokens: int, think_s: float, seed: int = 2
) -> list[Ask]:
    """Sessions side by side. Each turn has all before it in its prompt, and a tool's output behind it."""
    chance = random.Random(seed)
    system = make_tokens(seed, 2048)
    asks: list[Ask] = []
    for session in range(count):
        prompt = system + make_tokens(seed * 3_000_017 + session, first_tokens - len(system))
        before: Ask | None = None
        for turn in range(turns):
            answer = make_tokens(seed * 5_000_011 + session * 1000 + turn, new_tokens)
            at_s = chance.uniform(0, think_s) if before is None else chance.expovariate(1 / think_s)
            before = Ask(f"agent-{session}-{turn}", list(prompt), answer, at_s, before)
            asks.append(before)
            prompt = prompt + answer + make_tokens(seed * 7_000_003 + session * 1000 + turn, tool_tokens)
    return asks


def mix_agents(parts: Sequence[Sequence[Ask]], agents: Sequence[Ask], *, ttl_s: float = 0.0) -> list[list[Ask]]:
    """Other requests with one turn of each agent in every part, at some time of it. With `ttl_s` agents name their
    sessions, and let them go with the last turn."""
    chance, turns = random.Random(len(agents)), _count_turns(agents)
    mixed = [list(part) for part in parts]
    for ask in agents:
        name, _, turn = ask.name.rpartition("-")
        if int(turn) >= len(parts):
            continue
        part = mixed[int(turn)]
        wishes: dict[str, Any] = {"session": name, "session_ttl_s": ttl_s}
        if int(turn) + 1 == min(turns, len(parts)):
            action = {"action_id": "1", "action_type": "release", "action_version": "1", "payload": {"session": name}}
            wishes["kv_hints"] = {"protocol_version": "1", "message_id": ask.name, "actions": [action]}
        at_s = chance.uniform(0, parts[int(turn)][-1].arrival_s)
        part.append(Ask(ask.name, ask.prompt, ask.answer, at_s, wishes=wishes if ttl_s else None))
    return mixed


def _count_turns(agents: Sequence[Ask]) -> int:
    return 1 + max(int(ask.name.rpartition("-")[2]) for ask in agents)


def read_conversations(trace: Path, *, limit: int) -> list[Ask]:
    """About `limit` requests of a trace: some of its conversations, each as a whole, from all its hours."""
    requests = list(read_trace(trace))
    part, text = max(len(requests) // limit, 1), _TraceText()
    asks = []
    for number, request in enumerate(requests):
        # All conversations have the same first block; the second one tells them apart.
        root = request.hash_ids[min(1, len(request.hash_ids) - 1)] if request.hash_ids else 0
        if random.Random(root).randrange(part):
            continue
        answer = make_tokens(number + (1 << 50), max(request.output_length, 1))
        prompt = text.write(request, answer)
        asks.append(Ask(f"trace-{number}", prompt, answer, request.timestamp_ms / 1000))
    return asks


class _TraceText:
    """Tokens for a trace's ids. A turn goes on where the one before ended, with its answer. Ids do not tell that of the
    block in which it ended: each partly filled block has its own."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[int]] = {}
        self._turns: dict[tuple[int, int], list[int]] = {}
        """Prompts with their answers, by their last full block and its place."""

    def write(self, request: TraceRequest, answer: list[int]) -> list[int]:
        before: list[int] = []
        tokens: list[int] = []
        for at, block in enumerate(request.hash_ids):
            if block not in self._blocks:
                if at:
                    before = self._turns.get((at, request.hash_ids[at - 1]), before)
                known = before[len(tokens) : len(tokens) + BLOCK_TOKENS]
                new = make_tokens(block + (1 << 40), BLOCK_TOKENS)
                self._blocks[block] = known + new[len(known) :]
            tokens += self._blocks[block]
        prompt = tokens[: request.input_length]
        full = request.input_length // BLOCK_TOKENS
        if full:
            self._turns[full, request.hash_ids[full - 1]] = prompt + answer
        return prompt


def cut(asks: Sequence[Ask], parts: int) -> list[list[Ask]]:
    """Those that come in each part of the time; each part begins at 0."""
    part_s = asks[-1].arrival_s / parts
    found: list[list[Ask]] = [[] for _ in range(parts)]
    for ask in asks:
        at = min(int(ask.arrival_s / part_s), parts - 1)
        found[at].append(Ask(ask.name, ask.prompt, ask.answer, ask.arrival_s - at * part_s))
    return [part for part in found if part]


def come_at(asks: Sequence[Ask], *, tokens_per_s: float) -> list[Ask]:
    """The same in the same order, at times that bring so many tokens of prompts a second in the mean."""
    first_s, last_s = asks[0].arrival_s, asks[-1].arrival_s
    factor = count_tokens(asks) / tokens_per_s / max(last_s - first_s, 1e-9)
    return [Ask(ask.name, ask.prompt, ask.answer, (ask.arrival_s - first_s) * factor) for ask in asks]


def write_conversations(file: Path, *, requests: int, per_s: float = 3.3, seed: int = CONVERSATIONS_SEED) -> None:
    """A synthetic trace with what the published conversations have: 12,000 tokens of prompt in the mean and 340 of
    answer, one beginning for all, and turns that go on where the ones before ended (40% of all blocks are reused)."""
    chance = random.Random(seed)
    following: list[tuple[float, int, list[int]]] = []
    now_s, ids = 0.0, 0

    def new_ids(count: int) -> list[int]:
        nonlocal ids
        ids += count
        return list(range(ids - count + 1, ids + 1))

    with file.open("w") as lines:
        for _ in range(requests):
            now_s += chance.expovariate(per_s)
            due = [at for at, turn in enumerate(following) if turn[0] <= now_s]
            if due and chance.random() < 0.6:
                _, length, blocks = following.pop(due[0])
                length += min(int(chance.lognormvariate(7.2, 1.0)) + 1, 20_000)
            else:
                length, blocks = min(int(chance.lognormvariate(8.8, 0.9)) + BLOCK_TOKENS, 120_000), [0]
            whole = length // BLOCK_TOKENS
            blocks = blocks[:whole] + new_ids(max(whole - len(blocks), 0))
            rest = [] if length % BLOCK_TOKENS == 0 else new_ids(1)
            new_tokens = min(int(chance.lognormvariate(5.5, 0.8)) + 1, 2000)
            row = {"timestamp": int(now_s * 1000), "input_length": length, "output_length": new_tokens}
            lines.write(json.dumps({**row, "hash_ids": blocks + rest}) + "\n")
            if chance.random() < 0.75:
                following.append((now_s + chance.expovariate(1 / 60), length + new_tokens, blocks))


def count_tokens(asks: Sequence[Ask]) -> int:
    """Counts the tokens of all prompts."""
    return sum(len(ask.prompt) for ask in asks)


def iter_roots(asks: Sequence[Ask]) -> Iterator[Ask]:
    """Those that wait for no turn before them, by their arrival."""
    yield from sorted((ask for ask in asks if ask.after is None), key=lambda ask: ask.arrival_s)

"""How many tokens more would be hit if hits could end within a block, and which of them does vLLM allow?

Counts over a trace as `kvoffload replay` reads it, and over agents, with room for everything and nothing in the
engine's own cache: the most that finer hits can bring. The connector's code is not run here. What a turn shares with
the one before is known to the token: it goes on with its answer, where its length allows that. What prompts share else
is known in whole blocks of the trace.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Flag, auto
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.ground.models import MODELS, QWEN3_NEXT_80B, Model
from benchmarks.ground.work import Ask, make_agents
from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest, read_trace
from kvoffload.plan.model_shape import Keeps, ShapeSettings, read_shape

STEP_TOKENS = 8192
"""An engine computes so many of a prompt in a step, if it has nothing else to do."""
FINE_TOKENS = 16
"""The smallest `prefix_match_unit` that makes sense: what kernels work on at once."""


# ---- what prompts share ----


@dataclass(frozen=True, kw_only=True)
class Turn:
    """A request by what it shares with those before it."""

    tokens: int
    """The number of its prompt's tokens."""
    computed: int
    """The number of tokens with KV when its answer has ended: all but the last one."""
    shared: int
    """The number of tokens that its prompt has in common, from the beginning, with some earlier request."""
    path: Sequence[tuple[int, int]]
    """Each pair says who computed tokens first, and up to which; the last one is the request itself."""


def find_turns(requests: Iterable[TraceRequest]) -> list[Turn]:
    """Finds what each request shares, in the order of their arrival."""
    turns: list[Turn] = []
    first: dict[int, int] = {}
    """This tells by a block's id who had it first."""
    ended: dict[tuple[int, int], int] = {}
    """This tells by their number and the last one's id who ended last behind these full blocks."""
    for number, request in enumerate(requests):
        blocks = request.full_blocks(BLOCK_TOKENS)
        count = next((at for at, block in enumerate(blocks) if block not in first), len(blocks))
        shared, source = count * BLOCK_TOKENS, first[blocks[count - 1]] if count else None
        # All conversations may have their first block in common: that is no turn.
        before = ended.get((count, blocks[count - 1])) if count > 1 else None
        if before is not None and shared <= turns[before].computed <= request.input_length:
            shared, source = turns[before].computed, before
        computed = request.input_length + max(request.output_length, 1) - 1
        path = _cut(turns[source].path, shared) if source is not None else []
        turns.append(
            Turn(tokens=request.input_length, computed=computed, shared=shared, path=[*path, (number, computed)])
        )
        for block in blocks[count:]:
            first[block] = number
        if blocks:
            ended[len(blocks), blocks[-1]] = number
    return turns


def _cut(path: Sequence[tuple[int, int]], tokens: int) -> list[tuple[int, int]]:
    found = []
    for owner, end in path:
        found.append((owner, min(end, tokens)))
        if end >= tokens:
            break
    return found


def list_agents(asks: Iterable[Ask]) -> Iterator[TraceRequest]:
    """Makes a trace of agents' turns: all that come first, then all that come second, and so on."""
    ids: dict[tuple[int, int], int] = {}
    for ask in sorted(asks, key=lambda ask: int(ask.name.rpartition("-")[2])):
        blocks, before = [], 0
        for at in range(0, len(ask.prompt), BLOCK_TOKENS):
            text = hash(tuple(ask.prompt[at : at + BLOCK_TOKENS]))
            before = ids.setdefault((before, text), len(ids) + 1)
            blocks.append(before)
        yield TraceRequest(
            timestamp_ms=0.0,
            input_length=len(ask.prompt),
            output_length=len(ask.answer),
            hash_ids=tuple(blocks),
        )


# ---- what may be hit ----


class States(Flag):
    """The places at which recurrent states are kept."""

    NONE = 0
    PROMPT = auto()
    """By default they are at a prompt's last boundary, and at the last block before it parts from what is cached."""
    BLOCKS = auto()
    """They are at the ends of steps and of each block of an answer, with `prefix_cache_retention_interval=None`."""
    ANSWER = auto()
    """They are at the last boundary of an answer, too."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """The places at which hits may end."""

    unit: int | None
    """Hits are a multiple of so many tokens; None stands for a block's."""
    states: States


WAYS = {
    "whole blocks": Way(unit=None, states=States.PROMPT),
    "the same, all states": Way(unit=None, states=States.PROMPT | States.BLOCKS),
    "units of 16": Way(unit=FINE_TOKENS, states=States.PROMPT),
    "the same, all states ": Way(unit=FINE_TOKENS, states=States.PROMPT | States.BLOCKS),
    "states of answers' ends too": Way(unit=FINE_TOKENS, states=States.PROMPT | States.BLOCKS | States.ANSWER),
    "any token, any state": Way(unit=1, states=States.NONE),
}
"""The first two exist; vLLM hands the states of the last two to no connector."""


@dataclass
class _Kept:
    """Keeps states by who computed the token before them first; their boundaries ascend."""

    of: dict[int, list[int]] = field(default_factory=dict)

    def find(self, path: Sequence[tuple[int, int]], limit: int) -> int:
        """Finds the last one on a path that is not beyond `limit`."""
        begin, found = 0, 0
        for owner, end in path:
            boundaries = self.of.get(owner, ())
            at = bisect_right(boundaries, min(end, limit))
            if at and boundaries[at - 1] > begin:
                found = boundaries[at - 1]
            if end >= limit:
                break
            begin = end
        return found

    def keep(self, path: Sequence[tuple[int, int]], boundary: int) -> None:
        owner = next((owner for owner, end in path if end >= boundary), None)
        if boundary <= 0 or owner is None:
            return
        boundaries = self.of.setdefault(owner, [])
        at = bisect_right(boundaries, boundary)
        if not at or boundaries[at - 1] != boundary:
            insort(boundaries, boundary)


def count_hits(turns: Iterable[Turn], *, block: int, has_states: bool, way: Way) -> int:
    """Counts the tokens of all prompts that are hit. One of each prompt is always computed."""
    unit, kept, hits = way.unit or block, _Kept(), 0
    for turn in turns:
        attended = min(turn.shared, turn.tokens - 1) // unit * unit
        if not has_states or not way.states:
            hits += attended
            continue
        hit = kept.find(turn.path, attended)
        hits += hit
        for boundary in _find_states(turn, way, block=block, unit=unit, hit=hit, attended=attended):
            kept.keep(turn.path, boundary)
    return hits


def _find_states(turn: Turn, way: Way, *, block: int, unit: int, hit: int, attended: int) -> Iterator[int]:
    last = turn.tokens - 1
    if States.PROMPT in way.states:
        yield from (last // unit * unit, last // block * block)
        if attended > hit:
            yield attended // block * block
    if States.BLOCKS in way.states:
        at = hit
        while (at := (at + STEP_TOKENS) // block * block) < last:
            yield at
        yield from range((last // block + 1) * block, turn.computed + 1, block)
    if States.ANSWER in way.states:
        yield turn.computed // unit * unit


# ---- models ----


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """The number of tokens in a deployed model's blocks, which is equal in all its groups."""

    name: str
    block: int
    has_states: bool


def find_geometry(model: Model, *, name: str = "", state_dtype: str = "auto") -> Geometry:
    """A page of attention is no smaller than a state: that makes the blocks of hybrids long."""
    settings = ShapeSettings(kv_dtype=model.kv_dtype, state_dtype=state_dtype, ranks=model.ranks)
    layers = read_shape(model.config, settings).layers
    state = max((layer.state_bytes for layer in layers if layer.keeps is Keeps.STATE), default=0)
    token = next(layer.token_bytes * layer.copies for layer in layers if layer.keeps is Keeps.TOKENS)
    unit = model.block_size
    block = max(-(-state // (token * unit)), 1) * unit
    return Geometry(name=name or model.name, block=block, has_states=state > 0)


def list_geometries(blocks: Iterable[int] = ()) -> list[Geometry]:
    """Lists those of the proving ground, of Qwen3-Next on one rank as others deploy it, and made ones with states."""
    one = replace(QWEN3_NEXT_80B, ranks=1)
    return [
        *map(find_geometry, MODELS),
        find_geometry(one, name="Qwen3-Next-80B TP1"),
        find_geometry(one, name="the same, states in float32", state_dtype="float32"),
        find_geometry(replace(one, kv_dtype="fp8"), name="the same, and KV in fp8", state_dtype="float32"),
        *(Geometry(name="another with states", block=block, has_states=True) for block in blocks),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", default="2400,3520", help="tokens in blocks of others with states")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    agents = make_agents(5, turns=40, first_tokens=40_000, tool_tokens=1840, new_tokens=160, think_s=5.0)
    for what, requests in (("trace", read_trace(options.trace)), ("agents", list_agents(agents))):
        turns = find_turns(requests)
        asked = sum(turn.tokens for turn in turns)
        table = Table("model", "block", *map(str.strip, WAYS), title=f"{what}: tokens hit, % of {asked:,}")
        for geometry in list_geometries(map(int, filter(None, options.blocks.split(",")))):
            shares = {}
            for name, way in WAYS.items():
                hits = count_hits(turns, block=geometry.block, has_states=geometry.has_states, way=way)
                shares[name] = 100 * hits / asked
            if options.json:
                print(json.dumps({"work": what, "model": geometry.name, "block": geometry.block, **shares}))
            table.add_row(geometry.name, str(geometry.block), *(f"{share:.2f}" for share in shares.values()))
        if not options.json:
            Console(width=160).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

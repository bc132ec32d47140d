"""Computes what a model's tokens take in the cache, how many of them fit, and when loading them pays. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvoffload.plan.model_shape import Keeps, LayerShape, ModelShape


@dataclass(frozen=True, kw_only=True)
class GroupSize:
    """Layers that are alike. Bytes of all of them together, and of all ranks, which store equal bytes once."""

    what: str
    keeps: Keeps
    layers: int
    token_bytes: int = 0
    window_tokens: int = 0
    state_bytes: int = 0
    copies: int = 1
    """How many ranks hold the same bytes."""

    def hit_bytes(self, tokens: int) -> int:
        """Returns the bytes that a hit of so many tokens loads."""
        if self.keeps is Keeps.STATE:
            return self.state_bytes
        return self.token_bytes * (min(tokens, self.window_tokens) if self.keeps is Keeps.WINDOW else tokens)


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Of so many tokens at its end, in so many turns; each is saved where its prompt and its answer end."""

    tokens: int = 8000
    turns: int = 8


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """The bytes that one model takes in the cache."""

    groups: Sequence[GroupSize]

    @property
    def token_bytes(self) -> int:
        """The bytes that every further token takes."""
        return sum(group.token_bytes for group in self.groups if group.keeps is Keeps.TOKENS)

    def end_bytes(self, tokens: int) -> int:
        """Bytes of the windows and states at one place where a hit may end; the tokens before it take their own
        bytes."""
        return sum(group.hit_bytes(tokens) for group in self.groups if group.keeps is not Keeps.TOKENS)

    def hit_bytes(self, tokens: int) -> int:
        """Returns the bytes that a hit of so many tokens loads."""
        return sum(group.hit_bytes(tokens) for group in self.groups)

    def conversation_bytes(self, conversation: Conversation) -> int:
        """Returns the bytes that a conversation takes in the cache; no more for its windows than all their tokens."""
        ends = 2 * conversation.turns
        total = self.token_bytes * conversation.tokens
        for group in self.groups:
            if group.keeps is Keeps.STATE:
                total += group.state_bytes * ends
            elif group.keeps is Keeps.WINDOW:
                total += group.token_bytes * min(conversation.tokens, group.window_tokens * ends)
        return total

    def break_even_tokens(self, *, bytes_per_s: float, prefill_tokens_per_s: float, fixed_s: float) -> int | None:
        """Returns the number of tokens from which on a load is faster than computing them. None: it never is."""
        computing_s = 1 / prefill_tokens_per_s
        if self.token_bytes / bytes_per_s >= computing_s:
            return None
        # Windows may be shorter than their size: then a hit is cheaper than this says.
        ends_s = fixed_s + self.end_bytes(1 << 62) / bytes_per_s
        tokens = ends_s / (computing_s - self.token_bytes / bytes_per_s)
        return int(tokens) + 1


def size_model(shape: ModelShape) -> Sizing:
    """Groups in the order of their first layers."""
    found: dict[LayerShape, int] = {}
    for layer in shape.layers:
        found[layer] = found.get(layer, 0) + 1
    return Sizing(groups=[_group(layer, count) for layer, count in found.items()])


def _group(layer: LayerShape, count: int) -> GroupSize:
    return GroupSize(
        what=layer.what,
        keeps=layer.keeps,
        layers=count,
        token_bytes=layer.token_bytes * count,
        window_tokens=layer.tokens,
        state_bytes=layer.state_bytes * count,
        copies=layer.copies,
    )


@dataclass(frozen=True, kw_only=True)
class Place:
    """Somewhere to keep it, and how fast it comes from there to the engine."""

    name: str
    size_bytes: int
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class Holding:
    """The number of tokens that a place holds, and the time of a load from it."""

    place: Place
    tokens: int
    conversations: int
    load_s: float
    """Seconds that a hit of a thousand tokens takes to load."""
    break_even_tokens: int | None
    """None: unknown how fast tokens are computed, or a load is never faster."""


def hold(
    sizing: Sizing, places: Sequence[Place], conversation: Conversation, *, prefill: float, fixed_s: float
) -> Iterator[Holding]:
    """`prefill`: tokens a second; 0: unknown. `fixed_s`: of any load, however small."""
    each = sizing.conversation_bytes(conversation)
    for place in places:
        count = place.size_bytes // each
        rate = {"bytes_per_s": place.bytes_per_s, "prefill_tokens_per_s": prefill, "fixed_s": fixed_s}
        yield Holding(
            place=place,
            tokens=place.size_bytes * conversation.tokens // each,
            conversations=count,
            load_s=fixed_s + sizing.hit_bytes(1000) / place.bytes_per_s,
            break_even_tokens=sizing.break_even_tokens(**rate) if prefill else None,
        )

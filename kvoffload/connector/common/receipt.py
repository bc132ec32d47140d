"""A request's receipt: where the tokens of its prompt came from, and what that saved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from kvoffload.cache import NO_LIMIT

MEMORY = "memory"
UNKNOWN = "unknown"
"""The source of tokens that a slower tier brought too late, or whose server does not name its tiers."""

Sources: TypeAlias = tuple[tuple[str, int], ...]
"""Names of sources, each with a number of tokens, in the order of the tokens. A slower tier's name is its kind."""


def split_hit(local: int, boundary: int, reaches: Iterable[tuple[str, int]]) -> Sources:
    """Returns where the tokens from `local` to `boundary` came from.

    `reaches` are sources, the nearest first, each with the boundary that a hit has with it and those before it. A token
    so counts for the farthest source without which it would have been computed.
    """
    sources, end = [], local
    for name, reach in (*reaches, (UNKNOWN, NO_LIMIT)):
        more = min(reach, boundary) - end
        if more > 0:
            sources.append((name, more))
            end += more
    return tuple(sources)


@dataclass(frozen=True, kw_only=True)
class Receipt:
    """The sources of one request's prompt when it first ran. A failed load brought nothing."""

    engine_tokens: int
    """Number of tokens that were in the engine's own cache."""
    computed_tokens: int
    sources: Sources = ()
    """The tokens that were loaded."""
    saved_s: float = 0.0
    """Seconds in which the engine would have computed the loaded tokens; 0 while that is not known."""
    loaded_bytes: int = 0
    """Number of bytes that loads have brought, also after preemptions."""

    @property
    def tokens(self) -> dict[str, int]:
        """Number of tokens by where they came from: the engine's own cache, each source, and those computed."""
        tokens = {"engine": self.engine_tokens, "computed": self.computed_tokens}
        for name, count in self.sources:
            tokens[name] = tokens.get(name, 0) + count
        return tokens

    def without_load(self) -> Receipt:
        """Returns the receipt of the same request after its load has failed."""
        computed = self.computed_tokens + sum(count for _, count in self.sources)
        return replace(self, computed_tokens=computed, sources=(), saved_s=0.0)

    def describe(self) -> dict[str, Any]:
        """Returns it as the engine's answer has it, in JSON."""
        return {"tokens": self.tokens, "saved_s": round(self.saved_s, 6), "loaded_bytes": self.loaded_bytes}

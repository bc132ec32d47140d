"""Answers of a server to questions about itself become plain values here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvoffload.cache import CacheStats, CurvePoint, MemoryCurve, PlaceUsage, TenantUsage
from kvoffload.errors import ServerError
from kvoffload.protocol import Counts, Error, Insight, ModelUse, NamedCount, ServerMessage, Timing
from kvoffload.protocol.message import Reply, Request
from kvoffload.protocol.shape import name_of

_Kind = TypeVar("_Kind", bound=ServerMessage)
_IS_IT_THERE = "see whether the cache server runs"
_AS_OPERATOR = "ask as the server's user, or with its operator's token"


@dataclass(frozen=True, kw_only=True)
class TimedCalls:
    """Is a histogram: of what, counts by bucket with those beyond all bounds last, and the sum."""

    name: str
    label: str
    counts: tuple[int, ...]
    sum_s: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def bound(self, share: float, bounds_s: Sequence[float]) -> float | None:
        """Returns the bound that this share of the calls took at most. None: there were none, or they took longer than
        any bound."""
        wanted, seen = share * self.count, 0
        for count, bound_s in zip(self.counts, bounds_s, strict=False):
            seen += count
            if self.count and seen >= wanted:
                return bound_s
        return None


@dataclass(frozen=True, kw_only=True)
class ServerInsight:
    """What came of prompts, and how long what took; since the server began."""

    outcomes: Mapping[str, int]
    """Of prompts' tokens: `hit_memory`, `hit_lower`, or why they were computed."""
    errors: Mapping[str, int]
    """That were answered, by code."""
    timings: tuple[TimedCalls, ...]
    asked_blocks: int
    distinct_blocks: int
    """Of those that were asked for, about."""
    saved_s: float
    """What engines did not compute, in their own time."""
    models: tuple[ModelUse, ...] = ()
    """That use most of the memory."""
    speeds: Mapping[str, int] = field(default_factory=dict)
    """Of reading from tiers below, as measured last: bytes a second."""
    hints: Mapping[str, int] = field(default_factory=dict)
    """By action and outcome, as in `retain.done`."""
    hint_tokens: Mapping[str, int] = field(default_factory=dict)
    """Of their prefixes, by what came of them."""
    retained: int = 0
    retained_bytes: int = 0
    retained_limit_bytes: int = 0
    curve: MemoryCurve = field(default_factory=MemoryCurve)
    """What less and more memory would bring."""

    @property
    def ceiling(self) -> float | None:
        """Returns the share of the blocks asked for that an endless cache would have had; None: there were none."""
        if not self.asked_blocks:
            return None
        return max(0.0, 1 - self.distinct_blocks / self.asked_blocks)

    @property
    def hit_rate(self) -> float | None:
        """Returns the share of hits of the tokens asked for; None: there were none."""
        asked = sum(self.outcomes.values())
        hits = self.outcomes.get("hit_memory", 0) + self.outcomes.get("hit_lower", 0)
        return hits / asked if asked else None


def expect(answer: ServerMessage | None, kind: type[_Kind], call: str, *, is_refusable: bool = True) -> _Kind:
    """The answer, if it is what the call brings. ServerError: it is not."""
    if not isinstance(answer, kind):
        remedy = _AS_OPERATOR if is_refusable and isinstance(answer, Error) else _IS_IT_THERE
        raise ServerError(f"{call}: {_describe_fault(answer)}", remedy=remedy)
    return answer


def read_found(message: Request, answer: ServerMessage | None) -> Reply:
    """The answer, if it is none to refuse the request."""
    if not isinstance(answer, Reply) or isinstance(answer, Error):
        # A refusal begins with the call's name on the wire, which says nothing to who typed a command.
        line = _describe_fault(answer).removeprefix(f"{name_of(type(message))}: ")
        raise ServerError(line, remedy=_AS_OPERATOR if isinstance(answer, Error) else _IS_IT_THERE)
    return answer


def read_stats(answer: ServerMessage | None) -> CacheStats:
    found = expect(answer, Counts, "counts", is_refusable=False)
    counts: dict[str, Any] = {name: value for name, value in vars(found).items() if isinstance(value, int)}
    tenants = tuple(
        TenantUsage(name=tenant.name, quota_bytes=tenant.quota_bytes, used_bytes=tenant.used_bytes)
        for tenant in found.tenants
    )
    places = tuple(PlaceUsage(**vars(place)) for place in found.places)
    traffic = {one.tier: {k: v for k, v in vars(one).items() if isinstance(v, int)} for one in found.traffic}
    return CacheStats(tenants=tenants, places=places, traffic=traffic, **counts)


def read_insight(answer: ServerMessage | None) -> ServerInsight:
    message = expect(answer, Insight, "insight", is_refusable=False)
    return ServerInsight(
        outcomes=_read_counts(message.outcomes),
        errors=_read_counts(message.errors),
        timings=tuple(map(_read_timing, message.timings)),
        asked_blocks=message.asked_blocks,
        distinct_blocks=message.distinct_blocks,
        saved_s=message.saved_us / 1e6,
        models=message.models,
        speeds=_read_counts(message.speeds),
        hints=_read_counts(message.hints),
        hint_tokens=_read_counts(message.hint_tokens),
        retained=message.retained,
        retained_bytes=message.retained_bytes,
        retained_limit_bytes=message.retained_limit_bytes,
        curve=_read_curve(message),
    )


def _read_curve(message: Insight) -> MemoryCurve:
    points = tuple(
        CurvePoint(memory=one.quarters / 4, hit_blocks=one.hit_blocks, hit_bytes=one.hit_bytes) for one in message.curve
    )
    return MemoryCurve(
        asked_blocks=message.curve_blocks,
        asked_bytes=message.curve_bytes,
        one_in=message.curve_one_in,
        points=points,
    )


def _read_counts(rows: tuple[NamedCount, ...]) -> dict[str, int]:
    return {row.name: row.count for row in rows}


def _read_timing(timing: Timing) -> TimedCalls:
    counts = tuple(int(count) for count in np.frombuffer(timing.counts, "<u8"))
    return TimedCalls(name=timing.name, label=timing.label, counts=counts, sum_s=timing.sum_ns / 1e9)


def _describe_fault(answer: ServerMessage | None) -> str:
    return answer.message if isinstance(answer, Error) else "the cache server did not answer in time"

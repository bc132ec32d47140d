"""The last hour in counts: a row each few seconds, as the page draws them. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

EVERY_S = 5.0
POINTS = 720
"""An hour."""
MAX_SERIES = 96

_MEMORY = ("used_bytes", "capacity_bytes", "leases", "reserved")
_TIER = ("written_bytes", "promoted_bytes", "waiting_bytes", "waiting_requests")


class History:
    """Counts as they stood at each moment; the page that draws them computes their rise. Belongs to one loop."""

    def __init__(self) -> None:
        self._rows: deque[tuple[float, dict[str, float]]] = deque(maxlen=POINTS)

    def add(self, time_s: float, stats: Mapping[str, Any]) -> None:
        """Adds a row; `stats` is what /stats tells. Where the server is away, a row has nothing."""
        self._rows.append((round(time_s, 3), dict(list(_choose(stats))[:MAX_SERIES]) if stats.get("up") else {}))

    def describe(self) -> dict[str, Any]:
        """Returns columns: the times, and each series with None where it was not there."""
        names = sorted({name for _, row in self._rows for name in row})
        return {
            "every_s": EVERY_S,
            "times": [time_s for time_s, _ in self._rows],
            "series": {name: [row.get(name) for _, row in self._rows] for name in names},
        }


def _choose(stats: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name in _MEMORY:
        yield f"memory.{name}", stats["memory"][name]
    yield "evicted", stats["totals"]["evicted"]
    prompts = stats["prompts"]
    for name, count in (prompts["totals"] if prompts else {}).items():
        yield f"tokens.{name}", count
    for tier in stats["tiers"]:
        for name in _TIER:
            if name in tier["totals"]:
                yield f"tiers.{tier['name']}.{name}", tier["totals"][name]

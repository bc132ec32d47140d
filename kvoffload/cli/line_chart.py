"""Shares or amounts by size as lines, in one SVG picture that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape

_COLOURS = ("#3b7dd8", "#d0652a", "#2a9d5c", "#9b59b6", "#b08a1e", "#c0392b", "#168a8a", "#6b7280")
_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 150, 50, 50
_LABEL_HEIGHT = 15
_SHARES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)

Points = Sequence[tuple[float, float]]
"""Sizes above 0, in rising order, and shares from 0 to 1 or amounts from 0 on."""


def draw_shares(title: str, across: str, lines: Mapping[str, Points], *, dashed: str = "") -> str:
    """Draws shares by size. `across`: what sizes are, in percent. One line is a limit: it is dashed."""
    top = min(max((share for points in lines.values() for _, share in points), default=1.0) * 1.1, 1.0) or 1.0
    ticks = {share: f"{share:.0%}" for share in _SHARES if share <= top}
    return _draw(title, across, lines, ticks, top=top, name_size=lambda size: f"{size:g}%", dashed=dashed)


def draw_amounts(
    title: str, across: str, lines: Mapping[str, Points], *, name_size: Callable[[float], str], dashed: str = ""
) -> str:
    """Draws amounts of any size, as `draw_shares` does, with four round numbers on the axis."""
    most = max((amount for points in lines.values() for _, amount in points), default=0.0) or 1.0
    power = 10 ** math.floor(math.log10(most))
    step = next(part * power for part in (0.25, 0.5, 1.0, 2.5) if most <= 4 * part * power)
    ticks = {step * at: f"{step * at:g}" for at in range(5) if step * at <= most * 1.1}
    return _draw(title, across, lines, ticks, top=most * 1.1, name_size=name_size, dashed=dashed)


def _draw(
    title: str,
    across: str,
    lines: Mapping[str, Points],
    ticks: Mapping[float, str],
    *,
    top: float,
    name_size: Callable[[float], str],
    dashed: str,
) -> str:
    sizes = sorted({size for points in lines.values() for size, _ in points})
    place = _Place(sizes, top)
    ink = 'font-family="sans-serif" font-size="12" fill="#222"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" {ink}>',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="15">{escape(title)}</text>',
        f'<text x="{_LEFT}" y="{_HEIGHT - 12}">{escape(across)}</text>',
    ]
    for amount, name in ticks.items():
        y = place.y(amount)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{name}</text>')
    for size in sizes:
        parts.append(
            f'<text x="{place.x(size):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{name_size(size)}</text>'
        )
    labels = _spread({name: place.y(points[-1][1]) for name, points in lines.items() if points})
    for number, (name, points) in enumerate(lines.items()):
        colour = "#222" if name == dashed else _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{place.x(size):.1f},{place.y(share):.1f}" for size, share in points)
        dash = ' stroke-dasharray="5 4"' if name == dashed else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        if name in labels:
            x, y = _WIDTH - _RIGHT + 8, labels[name] + 4
            parts.append(f'<text x="{x}" y="{y:.1f}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Place:
    """Places sizes apart as their logarithms are."""

    def __init__(self, sizes: Sequence[float], top: float) -> None:
        self._low = math.log(sizes[0]) if sizes else 0.0
        self._span = (math.log(sizes[-1]) - self._low if sizes else 0.0) or 1.0
        self._top = top

    def x(self, size: float) -> float:
        return _LEFT + (math.log(size) - self._low) / self._span * (_WIDTH - _LEFT - _RIGHT)

    def y(self, share: float) -> float:
        return _HEIGHT - _BOTTOM - share / self._top * (_HEIGHT - _TOP - _BOTTOM)


def _spread(wanted: Mapping[str, float]) -> dict[str, float]:
    """Places labels from above so that none overlaps another."""
    found: dict[str, float] = {}
    last = -math.inf
    for name in sorted(wanted, key=lambda name: wanted[name]):
        last = found[name] = max(wanted[name], last + _LABEL_HEIGHT)
    return found

"""A bar chart as SVG text, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

COLOURS = ("#8a8f98", "#3b7dd8", "#2a9d5c")
BAR, GAP, PLOT_HEIGHT, MARGIN = 30, 28, 220, 46
LETTER = 6.2
"""Width of one of the legend's."""


def draw_bars(title: str, series: Mapping[str, Sequence[float]]) -> str:
    """One group of bars per position, one colour per series, values written above the bars."""
    positions = len(next(iter(series.values())))
    top = max(max(values) for values in series.values()) or 1.0
    group_width = BAR * len(series) + GAP
    width, height = MARGIN * 2 + group_width * positions, PLOT_HEIGHT + 110
    base = PLOT_HEIGHT + 50
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"',
        '  font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15">{escape(title)}</text>',
        f'<line x1="{MARGIN}" y1="{base}" x2="{width - MARGIN}" y2="{base}" stroke="#444"/>',
    ]
    legend_x = float(MARGIN)
    for row, (name, values) in enumerate(series.items()):
        colour = COLOURS[row % len(COLOURS)]
        for position, value in enumerate(values):
            x = MARGIN + GAP // 2 + position * group_width + row * BAR
            bar_height = PLOT_HEIGHT * value / top
            y = base - bar_height
            parts.append(f'<rect x="{x}" y="{y:.1f}" width="{BAR - 3}" height="{bar_height:.1f}" fill="{colour}"/>')
            parts.append(f'<text x="{x + BAR // 2 - 1}" y="{y - 4:.1f}" text-anchor="middle">{value:.0f}</text>')
        parts.append(f'<rect x="{legend_x:.1f}" y="{height - 22}" width="11" height="11" fill="{colour}"/>')
        parts.append(f'<text x="{legend_x + 16:.1f}" y="{height - 12}">{escape(name)}</text>')
        legend_x += 16 + LETTER * (len(name) + 2)
    for position in range(positions):
        x = MARGIN + position * group_width + group_width // 2
        parts.append(f'<text x="{x}" y="{base + 16}" text-anchor="middle">{position + 1}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"

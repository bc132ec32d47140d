"""The results of benchmarks as one HTML file that needs no other: a table with a bar for each value and its limit."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from pathlib import Path

from kvoffload import __version__
from kvoffload.bench.base import Bound, Measure, Result

_WIDEST = 1.5
"""The ratio of a full bar."""
_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d0d4da;
  --bar: #4a7bd0; --no: #b3402a; --yes: #2c7a3f }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6ea; --paper: #15171a; --line: #3a3f46; --bar: #6d9aea; --no: #e5836b; --yes: #75c78a }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap }
td.number, th.number { text-align: right }
.bar { position: relative; width: 12rem; height: .8rem; border: 1px solid var(--line) }
.bar i { position: absolute; inset: 0 auto 0 0; background: var(--bar) }
.bar b { position: absolute; top: -3px; bottom: -3px; width: 2px; background: var(--ink) }
.no { color: var(--no) } .yes { color: var(--yes) }
"""


def describe_machine() -> dict[str, str]:
    """Describes this machine without its name."""
    return {
        "kvoffload": __version__,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": find_processor(Path("/proc/cpuinfo")) or platform.machine(),
        "processors": str(os.cpu_count()),
        "kernel": f"{platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }


def find_processor(file: Path) -> str:
    """Returns the processor's name, as a /proc/cpuinfo says it; empty: it does not."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def render_report(results: Sequence[Result], questions: Mapping[str, str], machine: Mapping[str, str]) -> str:
    """`questions`: of each benchmark, by its name. Results of one benchmark follow one another."""
    told = "".join(f"<li>{escape(name)}: {escape(value)}</li>" for name, value in machine.items())
    parts = [_render_benchmark(name, questions.get(name, ""), list(rows)) for name, rows in groupby(results, _name_of)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>kvoffload bench</title><style>{_STYLE}</style></head>\n"
        f"<body><h1>kvoffload bench</h1>\n<ul>{told}</ul>\n"
        "<p>Each value stands beside the limit of this machine that was measured in turn with it. The mark in a bar is "
        f"the limit, its end {_WIDEST:g} times that.</p>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _name_of(result: Result) -> str:
    return result.name


def _render_benchmark(name: str, question: str, rows: list[Result]) -> str:
    heads = ("what", "", "value", "limit", "unit", "ratio", "spread", "goal", "met")
    cells = "".join(f'<th class="{_class_of(head)}">{head}</th>' for head in heads)
    asked = " ".join(question.split())
    return (
        f'<h2>{escape(name)}</h2>\n<p>{escape(asked)}</p>\n<div class="wide"><table>\n<tr>{cells}</tr>\n'
        + "\n".join(map(_render_row, rows))
        + "\n</table></div>"
    )


def _class_of(head: str) -> str:
    return "number" if head in ("value", "limit", "ratio", "spread") else ""


def _render_row(result: Result) -> str:
    what = ", ".join(f"{name} {value}" for name, value in result.params.items())
    width = min(max(result.ratio, 0.0), _WIDEST) / _WIDEST
    bar = f'<div class="bar"><i style="width:{width:.1%}"></i><b style="left:{1 / _WIDEST:.1%}"></b></div>'
    met = {None: "", True: '<span class="yes">yes</span>', False: '<span class="no">no</span>'}[result.is_met]
    numbers = (f"{result.value:.4g}", f"{result.limit:.4g}")
    cells = [
        f"<td>{escape(what)}</td><td>{bar}</td>",
        *(f'<td class="number">{number}</td>' for number in numbers),
        f"<td>{escape(result.unit)}</td>",
        f'<td class="number">{result.ratio:.3f}</td><td class="number">{result.spread:.1%}</td>',
        f"<td>{_describe_goal(result)}</td><td>{met}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _describe_goal(result: Result) -> str:
    goal = result.goal
    if goal is None:
        return ""
    sign = "&ge;" if goal.bound is Bound.AT_LEAST else "&le;"
    return f"{'ratio' if goal.measure is Measure.RATIO else escape(result.unit)} {sign} {goal.number:g}"

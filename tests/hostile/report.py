"""The report of a campaign: figures for each kind of attack, and a line for each promise that was broken."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kvoffload.protocol import MESSAGES
from kvoffload.protocol.shape import name_of
from tests.hostile.campaign import Ended, longest, p99, run_campaign, sort_rounds
from tests.hostile.ground import describe
from tests.house.tree import ROOT

FOLDER = ROOT / "build"
_LEGEND = "rounds with several kinds of attack, a store or a limit are in the row of each of them"


def make_report(seed: int, ended: Ended) -> dict[str, Any]:
    sent = {how: list_sent(ended, how) for how in ("largest", "random")}
    return {
        "seed": seed,
        "all": describe_rounds(ended),
        "by_kind": {name: describe_rounds(those) for name, those in sort_rounds(ended).items()},
        "never_sent": {how: sorted({name_of(kind) for kind in MESSAGES} - names) for how, names in sent.items()},
        "broken": [asdict(one) | {"setup": describe(one.at.setup)} for _, broken in ended for one in broken],
    }


def list_sent(ended: Ended, how: str) -> set[str]:
    """Messages that hostile users have sent at their `largest`, or with `random` fields."""
    counts = [count for found, _ in ended for done in found.done.values() for count in done]
    return {count.removeprefix(f"{how} ") for count in counts if count.startswith(f"{how} ")}


def describe_rounds(those: Ended) -> dict[str, Any]:
    """One row of figures. Waits are in milliseconds."""

    def times(role: str, name: str) -> list[tuple[float, float]]:
        return [one for found, _ in those for one in found.values(role, name)]

    acquires = times("loads", "acquires")
    return {
        "rounds": len(those),
        "acquires": len(acquires),
        "p99 ms": round(p99(acquires), 2),
        "longest ms": round(longest(acquires)[1], 1),
        "mark ms": round(longest(times("loads", "marks"))[1], 1),
        "greeting ms": round(longest(times("newcomers", "greetings"))[1], 1),
        "page ms": longest_asked(those, "page"),
        "gate ms": longest_asked(those, "gate"),
        "peak MiB": max((found.watched.peak_bytes >> 20 for found, _ in those), default=0),
        "restarts": sum(len(found.watched.ends) for found, _ in those),
        "broken": sum(len(broken) for _, broken in those),
    }


def longest_asked(those: Ended, what: str) -> float:
    """The longest that the web page or the TCP gate took to answer or to refuse."""
    asked = [took for found, _ in those for _, said, took in found.watched.asked if said.startswith(what)]
    return round(max(asked, default=0.0), 1)


def format_report(report: dict[str, Any]) -> str:
    figures = {**report["by_kind"], "all rounds": report["all"]}
    rows = [["", *report["all"]], *([name, *map(str, row.values())] for name, row in figures.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    lines.append(f"seed {report['seed']}; {_LEGEND}")
    for one in report["broken"]:
        at = one["at"]
        command = f"python -m tests.hostile --seed {at['seed']} --round {at['number']}"
        where = f"second {one['second']}; {', '.join(at['kinds'])}; {one['setup']}"
        lines.append(f"broken: {one['promise']}: {one['found']} ({where}): {command}")
    return "\n".join(lines) + "\n"


def run_and_report(seed: int, seconds: float, numbers: Sequence[int] = ()) -> dict[str, Any]:
    """Runs a campaign, prints its report, and writes it to build/hostile.json and build/hostile.txt."""
    report = make_report(seed, run_campaign(seed, seconds, numbers=numbers))
    text = format_report(report)
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "hostile.json").write_text(json.dumps(report, indent=1) + "\n")
    (FOLDER / "hostile.txt").write_text(text)
    print(text, end="", flush=True)
    return report

"""Makes the reference pages from code. `make docs` writes those that are committed; tests/house compares them."""

from __future__ import annotations

import re
from pathlib import Path

from docs.grafana import render_dashboard
from docs.protocol_tables import render_protocol
from docs.table import render_table
from kvoffload.config.sources import SettingRow, describe_settings
from kvoffload.config.tier_kinds import TIER_KINDS
from kvoffload.errors import walk_errors
from kvoffload.metrics.catalog import CATALOG
from kvoffload.metrics.labels import CALLS, OUTCOMES, SHOWN
from kvoffload.protocol.shape import name_of
from kvoffload.server.prices import PRICES

DOCS = Path(__file__).parent
ROOMS = DOCS.parent / "kvoffload"
NOTE = "<!-- Made by docs/generate.py from {source}; `make docs` rewrites it. -->"
NOTE_OF_SITE = "<!-- Made by docs/generate.py from {source} when the site is built. -->"


def render_pages() -> dict[str, str]:
    """The committed pages, by file name from here."""
    return {
        "configuration.md": _configuration(),
        "errors.md": _errors(),
        "metrics.md": _metrics(),
        "../examples/monitoring/grafana.json": render_dashboard(),
        "security.md": _security(),
        "write-a-tier.md": _write_a_tier(),
    }


def render_site_pages() -> dict[str, str]:
    """Pages of the site alone, which are not committed, by path from the root of the repository."""
    return {
        "docs/labels.md": _labels(),
        "docs/protocol-messages.md": render_protocol(NOTE_OF_SITE.format(source="kvoffload/protocol/")),
    }


def _write_a_tier() -> str:
    """Renders the example of a tier into a page that is written by hand."""
    text, example = (DOCS / "write-a-tier.md").read_text(), "examples/11_custom_tier/memory_tier.py"
    note, end = NOTE.format(source=example), "<!-- The end of the example. -->"
    before, behind = text.split(note)
    _, after = behind.split(end)
    return f"{before}{note}\n\n```python\n{(ROOMS.parent / example).read_text()}```\n\n{end}{after}"


def _security() -> str:
    """Renders the table of prices into a page that is written by hand."""
    text = (DOCS / "security.md").read_text()
    note, end = NOTE.format(source="kvoffload/server/prices.py"), "<!-- The end of the table. -->"
    before, behind = text.split(note)
    _, after = behind.split(end)
    rows = [
        [
            f"`{name_of(message)}`",
            price.work,
            price.place.value,
            f"{price.marks:,}",
            "" if price.memory_mib is None else f"{price.memory_mib} MiB",
        ]
        for message, price in PRICES.items()
    ]
    columns = ["message", "largest work", "done by", "loop is away, in marks", "memory"]
    return "\n".join([f"{before}{note}", "", *render_table(columns, rows), "", f"{end}{after}"])


def _configuration() -> str:
    rows = [
        [
            f"`{row.name}`",
            f"`{row.default}`" if row.default else "(empty)",
            row.allowed,
            row.description,
            _reader(row),
        ]
        for row in describe_settings()
    ]
    return _page(
        "Settings",
        "kvoffload/config/sources.py",
        "Sources in rising order: default, environment, TOML file, the engine's extra config, flag. A variable has\n"
        "the setting's name in capitals behind `KVOFFLOAD_`, such as `KVOFFLOAD_MEMORY=64GiB`. Unknown names are\n"
        "refused, but for the addresses of services that Kubernetes puts there.\n"
        "`kvoffload config show` prints each value and where it came from.",
        ["setting", "default", "allowed", "meaning", "read by"],
        rows,
    )


def _errors() -> str:
    rows = [[f"`{kind.code}`", kind.__name__, str(kind.exit_code), _sentence(kind)] for kind in walk_errors()]
    return _page(
        "Error codes",
        "kvoffload/errors.py",
        "Every fault that kvoffload raises on purpose. The command line ends with the exit code.",
        ["code", "class", "exit code", "meaning"],
        rows,
    )


def _labels() -> str:
    sections = (("outcome of prompt tokens", OUTCOMES), ("call or wait", CALLS), ("figure", SHOWN))
    rows = [[one.words, what, f"`{name}`", one.meaning] for what, labels in sections for name, one in labels.items()]
    return _page(
        "What the page and top show",
        "kvoffload/metrics/labels.py",
        "Each label of the page of [`kvoffload web`](monitoring.md#paths) and of `kvoffload top`, and what it means;\n"
        "on the page the meaning is shown where the pointer rests. The name is that in metrics, `/stats` and\n"
        "`--json`, if there is one.",
        ["label", "of", "name", "meaning"],
        rows,
        note=NOTE_OF_SITE,
    )


def _metrics() -> str:
    rows = [
        [
            f"`{metric.name}`",
            metric.source.value,
            metric.kind.value,
            metric.unit.value,
            ", ".join(f"`{label}`: {text}" for label, text in metric.labels.items()),
            metric.help,
            _recorded(metric.name),
        ]
        for metric in CATALOG
    ]
    return _page(
        "Metrics",
        "kvoffload/metrics/catalog.py",
        "Every metric: those of the engine are read with its own, those of the server from `kvoffload web`.",
        ["metric", "of", "kind", "unit", "labels", "meaning", "recorded"],
        rows,
    )


def _recorded(name: str) -> str:
    sources = (file.read_text() for file in ROOMS.rglob("*.py") if "metrics" not in file.parts)
    return "yes" if any(f'"{name}"' in text for text in sources) else "not yet"


def _reader(row: SettingRow) -> str:
    """The room that a setting is for, and whether any code reads it yet: a setting without effect says so."""
    sources = (file.read_text() for file in ROOMS.rglob("*.py") if file.parent != ROOMS / "config")
    is_read = any(kind.setting == row.name for kind in TIER_KINDS)
    is_read = is_read or any(re.search(rf"settings\.{row.name}\b", text) for text in sources)
    return f"`{row.room}`" if is_read else f"`{row.room}` (not read yet)"


def _sentence(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split())


def _page(title: str, source: str, intro: str, columns: list[str], rows: list[list[str]], *, note: str = NOTE) -> str:
    lines = [f"# {title}", "", note.format(source=source), "", intro, ""]
    lines += render_table(columns, rows)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for name, text in render_pages().items():
        (DOCS / name).write_text(text)

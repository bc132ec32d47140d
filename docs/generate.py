"""Makes tables and pages from code: the site has them, and `make docs` writes what is committed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from docs.grafana import render_dashboard
from docs.prices import PRICES
from docs.protocol_tables import render_protocol
from docs.table import render_table
from kvoffload.config.sources import SettingRow, describe_settings
from kvoffload.config.tier_kinds import TIER_KINDS
from kvoffload.errors import walk_errors
from kvoffload.metrics.catalog import CATALOG
from kvoffload.metrics.labels import CALLS, OUTCOMES, SHOWN
from kvoffload.metrics.metric import Metric, Source
from kvoffload.protocol.shape import name_of

DOCS = Path(__file__).parent
ROOMS = DOCS.parent / "kvoffload"
ENGINES = {"vLLM": ROOMS / "connector", "SGLang": ROOMS / "sglang"}
NOTE_OF_SITE = "<!-- Made by docs/generate.py from {source} when the site is built. -->"
PLACE = "<!-- The site has the table of {name} here. -->"
"""Stands in a page for one of `render_tables`."""
SEARCH_PLACE = "<!-- The site has a search of the next table here. -->"
SEARCH = (DOCS / "search.html").read_text().rstrip()


def render_pages() -> dict[str, str]:
    """Renders the files that are committed, by file name from here."""
    return {"../examples/monitoring/grafana.json": render_dashboard()}


def render_site_pages() -> dict[str, str]:
    """Pages of the site alone, which are not committed, by path from the root of the repository."""
    return {"docs/protocol-messages.md": render_protocol(NOTE_OF_SITE.format(source="kvoffload/protocol/"))}


def render_tables() -> dict[str, str]:
    """Tables that the site has in the places that committed pages leave for them, by name."""
    return {
        "settings": _settings(),
        "metrics": _metrics(),
        "errors": _errors(),
        "labels": _labels(),
        "prices": _prices(),
    }


def fill_places(text: str, tables: Mapping[str, str]) -> str:
    """Puts tables, and searches of tables, into the places that a page leaves for them."""
    for name, table in tables.items():
        text = text.replace(PLACE.format(name=name), table)
    return text.replace(SEARCH_PLACE, SEARCH)


def _prices() -> str:
    rows = [
        [
            f"`{name_of(message)}`",
            price.work,
            price.place.value,
            f"{price.marks:,}",
            f"{price.memory_mib} MiB",
        ]
        for message, price in PRICES.items()
    ]
    return _table(["message", "largest work", "done by", "loop is away, in marks", "memory"], rows)


def _settings() -> str:
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
    return _table(["setting", "default", "allowed", "meaning", "read by"], rows)


def _errors() -> str:
    rows = [[f"`{kind.code}`", kind.__name__, str(kind.exit_code), _sentence(kind)] for kind in walk_errors()]
    return _table(["code", "class", "exit code", "meaning"], rows)


def _labels() -> str:
    sections = (("outcome of prompt tokens", OUTCOMES), ("call or wait", CALLS), ("figure", SHOWN))
    rows = [[one.words, what, f"`{name}`", one.meaning] for what, labels in sections for name, one in labels.items()]
    return _table(["label", "of", "name", "meaning"], rows)


def _metrics() -> str:
    rows = [
        [
            f"`{metric.name}`",
            _counted_by(metric),
            metric.kind.value,
            metric.unit.value,
            ", ".join(f"`{label}`: {text}" for label, text in metric.labels.items()),
            metric.help,
            _recorded(metric.name),
        ]
        for metric in CATALOG
    ]
    return _table(["metric", "of", "kind", "unit", "labels", "meaning", "recorded"], rows)


def _counted_by(metric: Metric) -> str:
    """The engines in whose metrics it is, and the server."""
    who = [] if metric.source is Source.SERVER else [engine for engine in ENGINES if _has(ENGINES[engine], metric.name)]
    return ", ".join([*who, *(["server"] if metric.source is not Source.ENGINE else [])])


def _has(room: Path, name: str) -> bool:
    return any(f'"{name}"' in file.read_text() for file in room.rglob("*.py"))


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


def _table(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join(render_table(columns, rows))


if __name__ == "__main__":
    for name, text in render_pages().items():
        (DOCS / name).write_text(text)

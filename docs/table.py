"""Tables in Markdown."""

from __future__ import annotations


def render_table(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Its lines."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]

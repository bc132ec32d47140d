"""The documents tell the truth about the code."""

from __future__ import annotations

import re

import pytest

from docs.generate import render_pages
from kvoffload.config.sources import describe_settings
from kvoffload.errors import walk_errors
from kvoffload.metrics.catalog import CATALOG
from tests.house.tree import ROOT, read_texts, tracked_files

PAGES = render_pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name], "run make docs"


def test_every_setting_error_code_and_metric_is_listed() -> None:
    assert all(f"| `{row.name}` |" in PAGES["configuration.md"] for row in describe_settings())
    assert all(f"| `{kind.code}` |" in PAGES["errors.md"] for kind in walk_errors())
    assert all(f"| `{metric.name}` |" in PAGES["metrics.md"] for metric in CATALOG)


def test_links_between_documents_lead_somewhere() -> None:
    broken = []
    for file, text in read_texts().items():
        if file.suffix != ".md":
            continue
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in target and not (ROOT / file.parent / target).exists():
                broken.append(f"{file}: {target}")
    assert broken == []


def test_commands_named_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for file, text in read_texts().items():
        if file.suffix == ".md":
            for target in re.findall(r"`make ([a-z-]+)", text):
                assert target in targets, f"{file}: make {target}"


def test_the_two_commands_are_the_first_in_the_readme() -> None:
    first = (ROOT / "README.md").read_text().split("```")[1]
    assert [line.split("#")[0].strip() for line in first.strip().splitlines()] == ["make demo", "make test"]


def test_decisions_are_short_and_listed_without_a_gap() -> None:
    """The list has a line for each number, and each record is short and has a line that leads to it."""
    folder = ROOT / "docs/decisions"
    rows = re.findall(r"^\| (\d+) \| (?:.*\((\d{4}-.*?\.md)\) )?.*\|$", (folder / "README.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    records = {file.name for file in tracked_files() if file.parts[:2] == ("docs", "decisions")} - {"README.md"}
    assert records
    assert records == {record for _, record in rows if record}
    for record in records:
        assert (folder / record).read_text().count("\n") <= 40
        assert int(record[:4]) in {int(number) for number, told_in in rows if told_in == record}

"""The documents tell the truth about the code."""

from __future__ import annotations

import re

import pytest

from docs.generate import render_pages
from tests.house.tree import ROOT, read_texts

PAGES = render_pages()


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_file_is_what_the_code_says(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name], "run make docs"


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
    """The list has an item for each number, and each record is short and has an item that leads to it."""
    listed, *records = re.split(r"^## ", (ROOT / "docs/decisions/README.md").read_text(), flags=re.M)
    _, *items = re.split(r"^(\d+)\. ", listed, flags=re.M)
    assert [int(number) for number in items[::2]] == list(range(1, len(items) // 2 + 1))
    told = [int(record.partition(".")[0]) for record in records]
    assert told
    assert told == sorted({int(record) for item in items[1::2] for record in re.findall(r"\[(\d+)\]\(#", item)})
    for record in records:
        assert record.count("\n") <= 40


def test_no_text_tells_to_install_kvoffload_from_an_index() -> None:
    """It is in none, so a stranger who takes the name there would get the users that follow the advice."""
    by_name = re.compile(r"pip install [\"']?kvoffload\b")
    texts = {file: text for file, text in read_texts().items() if file.parts[0] in ("kvoffload", "docs", "examples")}
    assert len(texts) > 300
    assert [str(file) for file, text in texts.items() if by_name.search(text)] == []

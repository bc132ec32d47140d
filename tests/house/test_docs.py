"""The documents tell the truth about the code."""

from __future__ import annotations

import re

import pytest

from docs.generate import render_pages
from tests.house.tree import ROOT, read_texts

PAGES = render_pages()
REGISTER = "register: groups[1].record_bytes is 100 here, 104 there"
"""A message that tests/unit/protocol/test_document.py makes."""


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


def test_a_table_has_no_gap() -> None:
    """A row after an empty line begins a table of its own, whose second row is a rule."""
    for file, text in read_texts().items():
        if file.suffix == ".md":
            for first, second in re.findall(r"(?<!\|)\n(\|.*)\n(.*)", f"\n{text}"):
                assert re.fullmatch(r"\|[\s:|-]+", second), f"{file}: {first}"


def test_messages_that_troubleshooting_names_are_in_the_code() -> None:
    """Its tables quote messages, with `...` for the parts that differ."""
    page = (ROOT / "docs/troubleshooting.md").read_text()
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| ")]
    quoted = [message for cell in cells for message in re.findall(r'[`"]([^`"]* [^`"]*)[`"]', cell)]
    sources = (text for file, text in read_texts().items() if file.parts[0] in ("kvoffload", "native"))
    code = " ".join(re.sub(r'"\s*\n\s*f?"', "", "\n".join(sources)).split())
    said = [re.sub(r"^(kvoffload|absent): ", "", message) for message in quoted]
    pieces = [piece.strip() for message in said for piece in message.split("...")]
    assert len(pieces) > 20
    assert [piece for piece in pieces if piece not in code and piece != REGISTER] == []


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

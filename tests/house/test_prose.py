"""Texts are plain English: few have a habit that makes a reader stop, in the whole project and in each of its rooms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from docs.panels import PANEL_ROWS
from kvoffload.cli.app import make_app
from kvoffload.config.sources import describe_settings
from kvoffload.metrics.catalog import CATALOG
from kvoffload.metrics.labels import CALLS, OUTCOMES, SHOWN
from kvoffload.protocol import MESSAGES
from kvoffload.protocol.shape import Shape
from tests.house.prose import Text, find_texts
from tests.house.tree import read_texts

PLACES = (
    "kvoffload",
    "native",
    "benchmarks",
    "docs",
    "examples",
    "tests",
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
)
MOST_IN_ALL = 0.01
MOST_IN_A_ROOM = 0.02


@cache
def read_all() -> tuple[Text, ...]:
    files = [
        (file, content)
        for file, content in read_texts().items()
        if file.parts[0] in PLACES and "third_party" not in file.parts
    ]
    return tuple(text for file, content in files for text in find_texts(file, content))


def list_habits(texts: list[Text]) -> str:
    """Lists each text with a habit, and how to mend it."""
    return "\n".join(f"{text}\n    {habit}" for text in texts if (habit := text.find_habit()))


def test_few_texts_of_a_room_have_a_habit() -> None:
    texts = Counter(text.room for text in read_all())
    hits = Counter(text.room for text in read_all() if text.find_habit())
    over = [room for room, count in hits.items() if count > MOST_IN_A_ROOM * texts[room]]
    assert not over, list_habits([text for text in read_all() if text.room in over])


def test_few_of_all_texts_have_a_habit() -> None:
    hits = [text for text in read_all() if text.find_habit()]
    assert len(hits) <= MOST_IN_ALL * len(read_all()), list_habits(hits)


def find_helps(command: Any, name: str) -> Iterator[tuple[str, str]]:
    yield name, command.help or ""
    for parameter in command.params:
        yield f"{name} {parameter.name}", getattr(parameter, "help", "") or ""
    for inner, found in getattr(command, "commands", {}).items():
        yield from find_helps(found, f"{name} {inner}")


def list_shown() -> Iterator[tuple[str, str]]:
    """Lists texts that users see without the code: settings, metrics, labels, panels, fields of messages, and the help
    of commands."""
    yield from ((row.name, row.description) for row in describe_settings())
    yield from ((metric.name, metric.help) for metric in CATALOG)
    yield from ((name, label.meaning) for labels in (OUTCOMES, CALLS, SHOWN) for name, label in labels.items())
    yield from ((panel.title, panel.help) for row in PANEL_ROWS for panel in row.panels)
    shapes = [Shape(message) for message in MESSAGES]
    yield from ((field.name, field.help[:1].upper() + field.help[1:]) for shape in shapes for field in shape.fields)
    yield from find_helps(typer.main.get_command(make_app()), "kvoffload")


def test_no_text_that_is_shown_has_a_habit() -> None:
    texts = [Text(Path(name), 1, words, is_doc=True) for name, words in list_shown()]
    assert len(texts) > 500
    assert list_habits(texts) == ""


@pytest.mark.parametrize(
    ("words", "is_found"),
    [
        ("Of all stages.", True),
        ("In a row.", True),
        ("In a pool of one size, records are moved.", False),
        ("Number of ranks, over all pipeline stages.", False),
        ("Says whether the goal is met.", True),
        ("Whether the goal is met, or None if there is no goal.", False),
        ("What is not stored has no keys.", True),
        ("What does a request cost?", False),
        ("Blocks that are not stored have no keys.", False),
        ("The thread wakes whoever waits.", True),
        ("A figure is shown beside its limit.", True),
        ("Besides, it has a limit.", False),
    ],
)
def test_a_habit_is_found(words: str, *, is_found: bool) -> None:
    found = Text(Path("kvoffload/units.py"), 1, words, is_doc=True).find_habit()
    assert (found is not None) == is_found


def test_a_sentence_of_a_page_may_go_on_from_the_one_before() -> None:
    assert Text(Path("docs/disk.md"), 1, "In a row.", is_doc=False).find_habit() is None


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.py", '"""A module."""\nX = 1\n"""A number."""\n', [(1, "A module."), (3, "A number.")]),
        (
            "a.py",
            "def f():\n    '''A call.'''\n    # A comment that is long enough.\n",
            [(1, "A call."), (3, "A comm")],
        ),
        ("a.py", "x = 1  # noqa: E501\ny = 'no text'\n", []),
        ("a.cpp", "int a;\n// One block\n// of two lines.\nint b;\n", [(2, "One block of two lines.")]),
        (
            "a.md",
            "# Title of the page\n\n```\nsome code, some code\n```\nThe first sentence of it. Short.\n",
            [(6, "The first")],
        ),
        ("a.md", "| a row of a table | is no sentence |\n", []),
        ("a.toml", "# A comment of an unknown kind of file.\n", []),
    ],
)
def test_texts_are_found(name: str, content: str, found: list[tuple[int, str]]) -> None:
    texts = list(find_texts(Path(name), content))
    assert len(texts) == len(found)
    for text, (line, beginning) in zip(texts, found, strict=True):
        assert text.line == line
        assert text.words.startswith(beginning)


def test_a_room_is_a_folder_with_all_below_it() -> None:
    rooms = [Text(Path(name), 1, "", is_doc=True).room for name in ("docs/disk.md", "kvoffload/tiers/disk/a.py")]
    assert rooms == ["docs", "kvoffload/tiers"]

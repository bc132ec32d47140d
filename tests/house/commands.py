"""Blocks of the pages, and the commands in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.house.tree import read_texts

PROGRAMS = frozenset(
    {"curl", "docker", "helm", "kvoffload", "make", "pip", "prometheus", "python", "sha256sum", "vllm"}
)
"""First words of commands. A block that begins with one of them is for a shell."""
WITHOUT_VALUE = "..."
"""Stands for settings that are left out."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^(```+).*?^\1", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}: {self.text[:50].splitlines()[0]}"

    @property
    def is_shell(self) -> bool:
        return self.language in ("", "sh", "console") and find_program(self.text.splitlines()[0]) in PROGRAMS

    @property
    def is_json(self) -> bool:
        return self.language == "json" or (not self.language and self.text.startswith("{"))

    @property
    def is_drawing(self) -> bool:
        return not self.language and "──" in self.text

    @property
    def is_output(self) -> bool:
        return not (self.language or self.is_shell or self.is_json or self.is_drawing)


def find_program(statement: str) -> str:
    """The first word that sets no variable."""
    return next((word for word in statement.split() if not re.match(r"\w+=", word)), "")


def split_statements(text: str) -> Iterator[str]:
    """Yields commands of a shell, without comments that have lines of their own. A quote may hold several lines."""
    statement = ""
    for line in text.splitlines():
        statement += line
        if line.endswith("\\"):
            statement = statement[:-1]
        elif _is_open(statement):
            statement += "\n"
        else:
            if statement.strip() and not statement.lstrip().startswith("#"):
                yield statement.strip()
            statement = ""


def _is_open(statement: str) -> bool:
    """Whether a quote has no end."""
    try:
        shlex.split(statement, comments=True)
    except ValueError:
        return True
    return False


def _find_blocks() -> Iterator[Block]:
    for page, text in read_texts().items():
        if page.suffix == ".md":
            yield from (Block(page, language, inside) for language, inside in _BLOCK.findall(text))


def _find_statements() -> Iterator[tuple[Path, str]]:
    for block in BLOCKS:
        if block.is_shell:
            yield from ((block.page, statement) for statement in split_statements(block.text))


def _find_outputs() -> Iterator[tuple[str, str]]:
    for before, block in pairwise(BLOCKS):
        if block.is_output:
            assert before.is_shell, f"{block}: no command is shown before this output"
            assert before.page == block.page
            *_, command = split_statements(before.text)
            yield command, block.text


def _find_spans() -> Iterator[tuple[Path, str]]:
    for page, text in read_texts().items():
        if page.suffix == ".md":
            yield from ((page, " ".join(span.split())) for span in _SPAN.findall(_FENCED.sub("", text)))


BLOCKS = list(_find_blocks())
STATEMENTS = list(_find_statements())
"""Every command of a block."""
COMMANDS = [(page, statement) for page, statement in STATEMENTS if find_program(statement) == "kvoffload"]
OUTPUTS = dict(_find_outputs())
"""The output of a command, if the block after its own shows it."""
SPANS = sorted(set(_find_spans()))
"""Pieces of code in the sentences of pages."""

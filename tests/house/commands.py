"""Commands that the docs name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.house.tree import read_texts

_BLOCK = re.compile(r"^```(?:sh|console)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


WITHOUT_VALUE = "..."
"""Stands for settings that are left out."""


def find_commands() -> Iterator[tuple[Path, str]]:
    """Each of ours in a fenced block of a document, its continued lines joined."""
    for file, text in read_texts().items():
        if file.suffix != ".md":
            continue
        for block in _BLOCK.findall(text):
            for line in block.replace("\\\n", " ").splitlines():
                if line.strip().startswith("kvoffload "):
                    yield file, line.strip()


COMMANDS = list(find_commands())

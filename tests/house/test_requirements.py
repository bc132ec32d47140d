"""Packages that tests import are named in the tests' requirements, and do not just come with another package."""

from __future__ import annotations

import ast
import re
from importlib.metadata import packages_distributions

from tests.house.tree import ROOT, read_texts

BY_THE_WAY = {"triton"}
"""A requirement of a torch that is built for CUDA."""


def test_what_tests_import_is_pinned() -> None:
    pinned = read_pinned("engine", "tests")
    pinned_for_sglang = pinned | read_pinned("sglang")
    distributions = packages_distributions()
    unnamed = set()
    for file, text in read_texts().items():
        if file.parts[0] == "tests" and file.suffix == ".py":
            named = pinned_for_sglang if file.parts[:2] == ("tests", "sglang") else pinned
            for module in imported(text):
                names = {canonical(name) for name in distributions.get(module, ())}
                if names and not names & (named | BY_THE_WAY | {"kvoffload"}):
                    unnamed.add(f"{file}: {module}")
    assert unnamed == set()


def read_pinned(*names: str) -> set[str]:
    """Returns the packages that these lists of requirements name."""
    lines = [line for name in names for line in (ROOT / f"requirements/{name}.txt").read_text().splitlines()]
    return {canonical(line.split("==")[0]) for line in lines if "==" in line}


def imported(text: str) -> set[str]:
    """The first names of modules."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()

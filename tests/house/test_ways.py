"""The ways through the code that docs/architecture.md tells lead along functions that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.house.tree import ROOT

_STOP = re.compile(r"`([\w/]+\.(?:py|cpp))`\s+`([\w.:]+)`")


def read_ways() -> dict[str, list[str]]:
    """Returns the lines of each way, by what goes there."""
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("\n## Four ways through the code\n")[1].split("\n## ")[0]
    ways: dict[str, list[str]] = {}
    for part in re.split(r"^\*\*", section, flags=re.MULTILINE)[1:]:
        name, rest = part.split("**", 1)
        ways[name] = re.findall(r"^\d+\. (.*(?:\n   .*)*)", rest, flags=re.MULTILINE)
    return ways


def list_functions(file: Path) -> set[str]:
    """`Class.method` and `function` of Python, `Class::method` and `function` of C++."""
    text = file.read_text()
    if file.suffix == ".cpp":
        return set(re.findall(r"^[\w<>:&*\[\], ]*?\b((?:\w+::)*\w+)\(", text, flags=re.MULTILINE))
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{one.name}" for one in node.body if isinstance(one, ast.FunctionDef)}
        elif isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return found


def find_missing(lines: list[str]) -> list[str]:
    missing = []
    for line in lines:
        stops = _STOP.findall(line)
        if not stops:
            missing.append(f"no function: {line}")
        for path, function in stops:
            file = ROOT / path if path.startswith("native/") else ROOT / "kvoffload" / path
            if not file.is_file() or function not in list_functions(file):
                missing.append(f"{path} {function}")
    return missing


def test_four_ways_are_told_in_ten_lines_each() -> None:
    assert {name: len(lines) for name, lines in read_ways().items()} == {
        "One save": 10,
        "One load": 10,
        "One look-up": 10,
        "One record's way to disk.": 10,
    }


def test_every_line_names_functions_that_exist() -> None:
    for name, lines in read_ways().items():
        assert find_missing(lines) == [], name


def test_what_does_not_exist_is_found() -> None:
    assert find_missing(["`cache/index_reader.py` `IndexReader.find_it`: never"]) == [
        "cache/index_reader.py IndexReader.find_it"
    ]
    assert find_missing(["`native/src/cache/leases.cpp` `Leases::find_it`"]) == [
        "native/src/cache/leases.cpp Leases::find_it"
    ]
    assert find_missing(["nobody does it"]) == ["no function: nobody does it"]

"""Each sentence of docs/security.md about who cannot do what names the tests that try it."""

from __future__ import annotations

import re

import pytest

from tests.house.tree import ROOT

_NAMED = re.compile(r"`(tests/[\w/]+\.py|native/tests/\w+\.cpp)`((?: `\w+`)+)")


def read_rows() -> dict[str, str]:
    """Returns the rows, by who it is: what he cannot do."""
    section = (ROOT / "docs/security.md").read_text().split("\n## Who may be hostile\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {who.strip(): cannot for who, _, cannot in rows[1:]}


def find_missing(text: str) -> list[str]:
    missing = []
    for path, names in _NAMED.findall(text):
        file = ROOT / path
        source = file.read_text() if file.is_file() else ""
        for name in re.findall(r"\w+", names):
            form = rf"^TEST\({name}\)" if path.endswith(".cpp") else rf"^(?:async )?def {name}\("
            if not re.search(form, source, flags=re.MULTILINE):
                missing.append(f"{path} {name}")
    return missing


def test_all_who_may_be_hostile_are_there() -> None:
    assert len(read_rows()) == 12


@pytest.mark.parametrize("who", read_rows())
def test_what_nobody_can_do_is_tried(who: str) -> None:
    cannot = read_rows()[who]
    assert find_missing(cannot) == []
    untried = [sentence for sentence in re.split(r"(?<=\))\. ", cannot) if not _NAMED.search(sentence)]
    # Sentences about users who can do something need no test; those about users who cannot do.
    assert [sentence for sentence in untried if not sentence.startswith("Who can ")] == []


def test_what_does_not_exist_is_found() -> None:
    line = "(`tests/house/test_threats.py` `test_nothing`, `native/tests/test_none.cpp` `none` `nor_this`)"
    assert find_missing(line) == [
        "tests/house/test_threats.py test_nothing",
        "native/tests/test_none.cpp none",
        "native/tests/test_none.cpp nor_this",
    ]

"""Tests try each sentence of docs/security.md about what an attacker cannot do; tests/house/threats.toml names them."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.house.tree import ROOT

TESTS = tomllib.loads((ROOT / "tests/house/threats.toml").read_text())
PAGE = (ROOT / "docs/security.md").read_text()


def read_rows() -> dict[str, list[str]]:
    """Returns the sentences about what he cannot do, by who it is."""
    section = PAGE.split("\n## Who may be hostile\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {who.strip(): cannot.strip().split(". ") for who, _, cannot in rows[1:]}


def find_missing(named: str) -> list[str]:
    """Returns which tests do not exist, of a file and the names of tests in it."""
    path, *names = named.split()
    file = ROOT / path
    source = file.read_text() if file.is_file() else ""
    forms = {name: rf"^TEST\({name}\)" if path.endswith(".cpp") else rf"^(?:async )?def {name}\(" for name in names}
    missing = [f"{path} {name}" for name, form in forms.items() if not re.search(form, source, flags=re.MULTILINE)]
    return missing if source else [path, *missing]


def test_all_who_may_be_hostile_are_there() -> None:
    assert len(read_rows()) == 12


@pytest.mark.parametrize("who", read_rows())
def test_what_nobody_can_do_is_tried(who: str) -> None:
    assert read_rows()[who] == list(TESTS["hostile"][who])
    assert all(TESTS["hostile"][who].values())
    assert [one for tests in TESTS["hostile"][who].values() for named in tests for one in find_missing(named)] == []


def test_nobody_is_named_who_is_not_on_the_page() -> None:
    assert set(TESTS["hostile"]) == set(read_rows())


@pytest.mark.parametrize("what", TESTS["others"])
def test_what_bounds_a_user_is_on_the_page_and_tried(what: str) -> None:
    assert f"\n**{what}" in PAGE or f"\n| {what} |" in PAGE
    assert [one for named in TESTS["others"][what] for one in find_missing(named)] == []


def test_what_does_not_exist_is_found() -> None:
    assert find_missing("tests/house/test_threats.py test_nothing test_nobody_is_named_who_is_not_on_the_page") == [
        "tests/house/test_threats.py test_nothing"
    ]
    assert find_missing("native/tests/test_none.cpp none nor_this") == [
        "native/tests/test_none.cpp",
        "native/tests/test_none.cpp none",
        "native/tests/test_none.cpp nor_this",
    ]

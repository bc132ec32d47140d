"""`make check` runs every test once, those of `make test` among them."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.house.tree import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is missing")


def list_commands(goal: str) -> list[str]:
    """Returns what make would run, the set-up left out."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-n", "-o", "setup", goal]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def list_suites(goal: str) -> list[str]:
    """The calls of pytest in our own environment, not that of the newest vLLM."""
    return [line for line in list_commands(goal) if line.startswith(".venv/bin/python -m pytest ")]


def find_selected(suite: str) -> Iterator[str]:
    """Its test files, and the single tests that it names; a file of which it leaves some out is `FILE but TESTS`."""
    words = shlex.split(suite)
    options = {"--ignore": [], "--deselect": []}
    named = []
    rest = iter(words[words.index("pytest") + 1 :])
    for word in rest:
        if word in options:
            options[word].append(next(rest))
        elif word.startswith("tests"):
            named.append(word)
    ignored, left_out = options["--ignore"], options["--deselect"]
    for name in named:
        if "::" in name:
            yield name
            continue
        for file in sorted((ROOT / name).rglob("test_*.py")) or [ROOT / name]:
            path = str(file.relative_to(ROOT))
            if path in (*left_out, *ignored) or any(path.startswith(f"{folder}/") for folder in ignored):
                continue
            singles = sorted(single for single in left_out if single.startswith(f"{path}::"))
            yield f"{path} but {' '.join(singles)}" if singles else path


def test_check_runs_the_tests_of_make_test() -> None:
    assert len(list_suites("test")) == 2
    assert set(list_suites("test")) < set(list_suites("check"))
    assert {line for line in list_commands("test") if "ctest" in line} < set(list_commands("check"))


def test_check_runs_each_test_once() -> None:
    selected = [one for suite in list_suites("check") for one in find_selected(suite)]
    whole = {one for one in selected if "::" not in one}
    (partly,) = (one for one in selected if " but " in one)
    file, _, left_out = partly.partition(" but ")
    assert sorted(one for one in selected if "::" in one and one != partly) == left_out.split()
    assert len(selected) == len(set(selected))
    assert whole | {file} == {str(found.relative_to(ROOT)) for found in (ROOT / "tests").rglob("test_*.py")}

"""Writes docs/versions.md from what test runs noted: `python -m docs.versions VERSION.xml ...`, in `make versions`.

Each file is pytest's own report (`--junitxml`) of a run of tests/vllm on one vLLM, whose version is the file's name. Of
several runs on one version a test file's last one counts.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

from docs.table import render_table

PAGE = Path(__file__).with_name("versions.md")
FOLDER = "tests.vllm"
INTRO = """# vLLM versions

<!-- Made by docs/versions.py from test runs; `make versions` rewrites it. -->

Which of the real engine's tests ran on which vLLM, all on a CPU: the CPU build of `requirements/engine.txt`, that of
the oldest version (`make oldest`), and the newest release's Python over the former's compiled parts (`make newest`). A
dash: the file was not run there, so nothing is known. Tests that `make campaign` adds are not counted.
"""
Outcomes = Mapping[str, Counter[str]]
"""Counts, for each test file, how many of its tests ended how."""


def read_report(text: str) -> Outcomes:
    """Reads what a run of pytest noted. Files from elsewhere are left out."""
    found: dict[str, Counter[str]] = {}
    for case in ElementTree.fromstring(text).iter("testcase"):
        module = re.match(rf"{re.escape(FOLDER)}\.(test_\w+)", case.get("classname", ""))
        if module:
            found.setdefault(f"{module[1]}.py", Counter())[_outcome(case)] += 1
    return found


def _outcome(case: ElementTree.Element) -> str:
    kinds = {child.tag for child in case}
    if kinds & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in kinds else "passed"


def render_versions(reports: Mapping[str, Outcomes], files: list[str]) -> str:
    """Renders the page, with a row for each file, even one that was never run."""
    versions = sorted(reports, key=lambda version: [int(part) for part in re.findall(r"\d+", version)])
    rows = [[f"`{file}`", *(_cell(reports[version].get(file)) for version in versions)] for file in files]
    return "\n".join([INTRO, *render_table(["tests/vllm", *versions], rows)]) + "\n"


def _cell(outcomes: Counter[str] | None) -> str:
    if not outcomes:
        return "-"
    return ", ".join(f"{outcomes[kind]} {kind}" for kind in ("passed", "failed", "skipped") if outcomes[kind])


if __name__ == "__main__":
    given: dict[str, dict[str, Counter[str]]] = {}
    for path in map(Path, sys.argv[1:]):
        given.setdefault(path.stem, {}).update(read_report(path.read_text()))
    PAGE.write_text(render_versions(given, sorted(path.name for path in Path("tests/vllm").glob("test_*.py"))))

"""A planted upward import fails the gate that `make check` runs; the tree as it is passes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.house.tree import ROOT

# Without site, so that an editable install does not lead the linter back from the copy to the tree.
LINT_IMPORTS = [sys.executable, "-S", "-c", "from importlinter.cli import lint_imports_command as run; run()"]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "kvoffload", tmp_path / "kvoffload", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    command = [*LINT_IMPORTS, "--no-cache"]
    return subprocess.run(command, cwd=folder, env={"PYTHONPATH": path}, capture_output=True, text=True, check=False)


def test_the_tree_keeps_its_contracts(copy: Path) -> None:
    done = lint(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "planted"),
    [
        ("kvoffload/keys/planted.py", "from kvoffload.cli import app"),
        ("kvoffload/config/sources.py", "import kvoffload.metrics.catalog"),
        ("kvoffload/kvspec/planted.py", "import pydantic"),
        ("kvoffload/bench/planted.py", "import kvoffload.connector.plugin"),
        ("kvoffload/bench/planted.py", "from benchmarks.parts import arena"),
        ("kvoffload/transfer/planted.py", "import vllm"),
        ("kvoffload/server/planted.py", "import torch"),
        ("kvoffload/server/planted.py", "import time"),
        ("kvoffload/cache/planted.py", "import kvoffload.server"),
        ("kvoffload/protocol/planted.py", "import zmq"),
        ("kvoffload/protocol/planted.py", "import socket"),
        ("kvoffload/protocol/planted.py", "from kvoffload.wire_codec import CODEC"),
        ("kvoffload/protocol/planted.py", "from kvoffload.keys import identity"),
        ("kvoffload/unlisted_room.py", "import kvoffload.errors"),
    ],
)
def test_a_planted_import_is_caught(copy: Path, file: str, planted: str) -> None:
    with (copy / file).open("a") as stream:
        stream.write(f"\n{planted}\n")
    done = lint(copy)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout or "exhaustive" in done.stdout, done.stdout + done.stderr


def test_make_check_runs_the_contracts() -> None:
    rules = (ROOT / "Makefile").read_text()
    check = next(line for line in rules.splitlines() if line.startswith("check:"))
    assert " imports " in check
    assert " test " in check
    assert "exec make check" in (ROOT / ".ci" / "run").read_text()

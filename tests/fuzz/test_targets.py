"""Each target survives its seeds and inputs made of them; in the campaign, a fuzzer that looks for new branches."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.fuzz.decoders import PYTHON
from tests.fuzz.parts import mutate
from tests.house.tree import ROOT

INPUTS = 300
SECONDS = int(os.environ.get("KVOFFLOAD_TESTS_FUZZ_SECONDS", "600"))
RSS_LIMIT_MB = 1024
INPUT_TIMEOUT_S = 20
FOUND = Path(__file__).parent / "found"


def seeds_of(name: str) -> list[bytes]:
    """Returns a target's seeds, with what once broke it."""
    found = FOUND / f"{name}.txt"
    lines = found.read_text().splitlines() if found.exists() else []
    return [*import_module(f"tests.fuzz.{name}").make_seeds(), *map(bytes.fromhex, filter(is_input, lines))]


def is_input(line: str) -> bool:
    return bool(line) and not line.startswith("#")


@pytest.mark.parametrize("name", PYTHON)
def test_seeds_and_what_is_made_of_them_break_nothing(name: str) -> None:
    run, seeds, choice = import_module(f"tests.fuzz.{name}").run, seeds_of(name), random.Random(1)
    for data in [*seeds, *(mutate(seeds, choice) for _ in range(INPUTS))]:
        try:
            run(data)
        except BaseException:
            print(f"the input: {data.hex()}")
            raise


def fuzz(name: str, folder: Path, bound: str) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed (it has wheels for x86_64 and Python up to 3.13)")
    for at, seed in enumerate(seeds_of(name)):
        (folder / f"seed{at}").write_bytes(seed)
    command = [sys.executable, "-m", "tests.fuzz", name, bound, "-max_len=4096", f"-artifact_prefix={folder}/"]
    command += [f"-rss_limit_mb={RSS_LIMIT_MB}", f"-timeout={INPUT_TIMEOUT_S}"]
    done = subprocess.run([*command, str(folder)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert " cov: " in done.stderr, "the fuzzer sees no branches: what it runs was not instrumented"


def test_the_fuzzer_sees_branches(tmp_path: Path) -> None:
    """Modules of an editable install come by a loader of their own, which atheris does not instrument."""
    fuzz("http_requests", tmp_path, "-runs=100")


@pytest.mark.campaign
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("name", PYTHON)
def test_coverage_guided_bytes_break_nothing(name: str, tmp_path: Path) -> None:
    fuzz(name, tmp_path, f"-max_total_time={SECONDS}")

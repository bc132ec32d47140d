"""The server's core under a fuzzer that looks for new branches. `make campaign` runs it; a little of it runs always."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.house.tree import ROOT
from tests.unit.daemon.core_bytes import make_seeds, serve_all

RUNS = 50_000
RSS_LIMIT_MB = 1024


def test_every_seed_is_served() -> None:
    for seed in make_seeds():
        serve_all(seed)


SEEDS = list(make_seeds())


@given(st.lists(st.sampled_from(SEEDS), min_size=1, max_size=6), st.data())
def test_seeds_with_wrong_bytes_break_nothing(seeds: list[bytes], data: st.DataObject) -> None:
    steps = bytearray(b"".join(seeds))
    for _ in range(data.draw(st.integers(0, 4))):
        steps[data.draw(st.integers(0, len(steps) - 1))] = data.draw(st.integers(0, 255))
    serve_all(bytes(steps))


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_coverage_guided_bytes_break_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed (it has wheels for x86_64 and Python up to 3.13)")
    for at, seed in enumerate(make_seeds()):
        (tmp_path / f"seed{at}").write_bytes(seed)
    command = [sys.executable, "-m", "tests.unit.daemon.atheris_core", f"-runs={RUNS}", "-max_len=4096"]
    command += [f"-rss_limit_mb={RSS_LIMIT_MB}", f"-artifact_prefix={tmp_path}/", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

"""The decoder under a fuzzer that looks for new branches, from the golden frames on. `make campaign` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvoffload.protocol import MESSAGES
from kvoffload.protocol.shape import Shape, name_of
from tests.house.tree import ROOT
from tests.unit.protocol.examples import make_example
from tests.unit.protocol.golden import make_frame

RUNS = 3_000_000
RSS_LIMIT_MB = 512


@pytest.mark.campaign
@pytest.mark.timeout(3600)
def test_coverage_guided_bytes_break_nothing(tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is not installed (it has wheels for x86_64 and Python up to 3.13)")
    for message in MESSAGES:
        frame = make_frame(make_example(Shape(message), version=1), 1)
        (tmp_path / name_of(message)).write_bytes(frame)
    command = [sys.executable, "-m", "tests.unit.protocol.atheris_decoder", f"-runs={RUNS}", "-max_len=4096"]
    command += [f"-rss_limit_mb={RSS_LIMIT_MB}", f"-artifact_prefix={tmp_path}/", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

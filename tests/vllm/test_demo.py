"""`make demo` does what it says: a conversation whose cache survives the engine's own, a table and a picture of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"


@pytest.mark.vllm
def test_the_demo_restores_a_conversation_and_draws_it(tmp_path: Path) -> None:
    command = [sys.executable, str(DEMO), "--cache-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "KVOffloadConnector" in done.stdout
    assert "restored against the engine's own cache: equal" in done.stdout
    assert ElementTree.parse(tmp_path / "demo.svg").getroot().tag.endswith("svg")

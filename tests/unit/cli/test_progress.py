"""A bar is for terminals: nothing of it goes into a pipe."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

from kvoffload.cli.progress import progress

SHOWN = """
from kvoffload.cli.progress import progress
with progress(2) as tell:
    tell("half of it", 1)
    input()
"""


def test_nothing_is_written_to_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2) as tell:
        tell("half of it", 1)
        tell("all of it", 1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_how_far_it_is() -> None:
    end, own = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", SHOWN],
        stdin=own,
        stdout=own,
        stderr=own,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(own)
        shown = b""
        while True:
            try:
                came = os.read(end, 65536)
            except OSError:  # its other end is closed
                break
            if not came:
                break
            is_seen = b"half of it" in shown
            shown += came
            if b"half of it" in shown and not is_seen:
                os.write(end, b"\n")
        assert process.wait(60) == 0
    os.close(end)
    assert b"1/2" in shown
    assert b"half of it" in shown

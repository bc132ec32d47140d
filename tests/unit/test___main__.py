"""The command line without its script."""

from __future__ import annotations

import subprocess
import sys

from kvoffload import __version__


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "kvoffload", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"kvoffload {__version__}\n"

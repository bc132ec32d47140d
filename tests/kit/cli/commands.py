"""Commands of `kvoffload`, run in this process."""

from __future__ import annotations

import subprocess
import sys


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)

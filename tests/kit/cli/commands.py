"""Commands of `kvoffload`, each run by a process of its own."""

from __future__ import annotations

import subprocess
import sys

LONGEST_S = 300.0
"""Far more than any command that ends by itself takes. A server that should have been refused would serve for ever."""


def run(*arguments: str, timeout_s: float = LONGEST_S) -> subprocess.CompletedProcess[str]:
    """Returns how the command ended. TimeoutExpired: it had to be killed, because it did not end by itself."""
    command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)

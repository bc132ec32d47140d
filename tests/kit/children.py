"""Processes that tests start: they end with the test, whatever it finds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def child(
    arguments: Sequence[str], *, says: str = "", env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """A Python process, after it has printed the line `says`; it is killed on the way out."""
    with subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as process:
        try:
            if says:
                assert process.stdout is not None
                assert process.stdout.readline() == says + "\n"
            yield process
        finally:
            process.kill()


def stop(process: subprocess.Popen[Any]) -> None:
    """It does nothing from here on until it is told SIGCONT. Sent alone, the signal leaves it a moment."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)

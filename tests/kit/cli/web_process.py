"""A process of `kvoffload web`, and what it answers."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def web(path: Path, *settings: str) -> Iterator[str]:
    """Runs the web command, and yields its address."""
    words = [word for one in (f"server={path}", "http=tcp://127.0.0.1:0", *settings) for word in ("--set", one)]
    command = [sys.executable, "-m", "kvoffload", "web", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"kvoffload tells of {path} at http://127.0.0.1:"), line
            yield line.split()[-1]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()


def get(address: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(address, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as fault:
        return fault.code, fault.read()


def is_there(address: str) -> bool:
    """Whether a server answers at this address and has the page."""
    try:
        return get(address)[0] == 200
    except urllib.error.URLError:
        return False

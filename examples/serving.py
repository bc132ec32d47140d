"""A cache server for as long as an example runs."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def serve(*, memory: str, **settings: str) -> Iterator[Path]:
    """`kvoffload serve` on a socket in a folder of its own; gives the socket."""
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "kvoffload.sock"
        command = [sys.executable, "-c", "from kvoffload.cli.app import main; main()", "serve", "--adopt-wait", "0"]
        command += ["--set", f"server={socket}", "--set", f"memory={memory}", "--set", "segment_size=64MiB"]
        command += ["--set", "log_level=warning"]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                print(server.stdout.readline(), end="", flush=True)
                yield socket
            finally:
                server.terminate()

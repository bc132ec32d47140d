"""`kvoffload top` as a user meets it: once, as JSON, and live in a pseudo-terminal that changes its size."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from kvoffload.cli.top import UNREACHABLE
from tests.kit.cli.commands import run
from tests.kit.server.tiers import await_that, serving

WAIT_S = 60.0


def test_once_as_json_and_as_text(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        done = run("top", "--once", "--json", "--set", f"server={tmp_path / 's'}")
        assert done.returncode == 0, done.stderr
        [row] = [json.loads(line) for line in done.stdout.splitlines()]
        assert row["up"]
        assert row["memory"]["capacity_bytes"] > 0
        assert row["hit_rate"] is None
        shown = run("top", "--once", "--set", f"server={tmp_path / 's'}")
        assert shown.returncode == 0
        assert "memory" in shown.stdout
        assert "\x1b" not in shown.stdout


def test_a_pipe_gets_a_look_after_the_other(tmp_path: Path) -> None:
    with serving(tmp_path / "s") as server:
        await_that(lambda: server.has_memory)
        command = [sys.executable, "-m", "kvoffload", "top", "--interval", "0.1", "--set", f"server={tmp_path / 's'}"]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            shown = [process.stdout.readline() for _ in range(12)]
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
        assert process.returncode == 0
        assert len([line for line in shown if line.startswith("memory ")]) >= 2


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    done = run("top", "--once", "--json", "--set", f"server={tmp_path / 's'}")
    assert done.returncode == UNREACHABLE
    row = json.loads(done.stdout)
    assert (row["up"], bool(row["fault"])) == (False, True)
    assert run("top", "--set", "server=").returncode == 2


class Terminal:
    """A pseudo-terminal with the command in it."""

    def __init__(self, *arguments: str) -> None:
        self._end, own = pty.openpty()
        self.resize(24, 80)
        command = [sys.executable, "-m", "kvoffload", "top", *arguments]
        self.process = subprocess.Popen(
            command, stdin=own, stdout=own, stderr=own, start_new_session=True, env={**os.environ, "TERM": "xterm"}
        )
        os.close(own)
        self.shown = b""

    def resize(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._end, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def await_text(self, *texts: str) -> None:
        """All of them, in what it shows from now on."""
        self.shown = b""
        end_s = time.monotonic() + WAIT_S
        while not all(text.encode() in self.shown for text in texts):
            assert time.monotonic() < end_s, self.shown[-2000:]
            self._read(0.1)

    def press(self, key: bytes) -> None:
        os.write(self._end, key)

    def wait(self) -> int:
        end_s = time.monotonic() + WAIT_S
        while self.process.poll() is None:
            assert time.monotonic() < end_s
            self._read(0.02)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._end)

    def _read(self, wait_s: float) -> None:
        if select.select([self._end], [], [], wait_s)[0]:
            try:
                self.shown += os.read(self._end, 1 << 16)
            except OSError:  # the other side has ended
                time.sleep(wait_s)


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_live_it_follows_the_server_and_the_terminal(tmp_path: Path, is_interrupted: bool) -> None:
    path = tmp_path / "s"
    terminal = Terminal("--interval", "0.1", "--set", f"server={path}")
    try:
        with serving(path) as server:
            await_that(lambda: server.has_memory)
            terminal.await_text("memory", "requests", "process")
            terminal.resize(10, 40)
            terminal.process.send_signal(signal.SIGWINCH)
            terminal.await_text("memory", "requests")
        terminal.await_text("no answer")
        with serving(path) as server:
            await_that(lambda: server.has_memory)
            terminal.await_text("memory")
        if is_interrupted:
            terminal.process.send_signal(signal.SIGINT)
        else:
            terminal.press(b"q")
        assert terminal.wait() == 0
    finally:
        terminal.close()

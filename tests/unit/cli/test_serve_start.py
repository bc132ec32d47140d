"""A server reports the state of its memory while it starts."""

from __future__ import annotations

import io
import logging
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvoffload.cli.serve_start import STALLED_S, StandardError, StartTeller
from kvoffload.units import MIB


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Start:
    """A server whose memory comes as a test says, and a clock."""

    def __init__(self) -> None:
        self.server: Any = SimpleNamespace(has_memory=False, ready_bytes=0)
        self.now_s = 0.0
        self.teller = StartTeller(self.server, memory_bytes=256 * MIB, notify="", clock=lambda: self.now_s)

    def reach(self, size_bytes: int, *, seconds: float = 1.0) -> None:
        self.now_s += seconds
        self.server.has_memory, self.server.ready_bytes = size_bytes > 0, size_bytes
        self.teller.look()


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """It is standard error until the test ends. To be called in the test, as pytest sets its own before each phase."""
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    return shown


def test_ready_is_told_once_when_the_first_memory_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    start = Start()
    start.reach(0)
    assert capsys.readouterr().out == ""
    start.reach(128 * MIB)
    start.reach(256 * MIB)
    told = capsys.readouterr()
    assert told.out == "ready: 256MiB of memory, 128MiB of it so far\n"
    assert told.err == ""


def test_a_terminal_shows_how_far_the_memory_is(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    start = Start()
    start.reach(64 * MIB)
    start.reach(192 * MIB)
    start.reach(256 * MIB)
    assert "/256.0 MiB" in terminal.getvalue()


def test_a_bar_that_does_not_move_any_more_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    start = Start()
    start.reach(64 * MIB)
    start.reach(64 * MIB, seconds=STALLED_S + 1)
    shown = terminal.getvalue()
    start.reach(256 * MIB)
    assert terminal.getvalue() == shown


def test_a_log_line_goes_to_what_is_standard_error_then(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    handler = StandardError()
    handler.handle(logging.makeLogRecord({"msg": "memory is short"}))
    assert terminal.getvalue() == "memory is short\n"

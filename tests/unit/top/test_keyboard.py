"""Keys of a pseudo-terminal."""

from __future__ import annotations

import os
import pty
import signal
import sys
import termios
import threading
from collections.abc import Iterator

import pytest

from kvoffload.top.keyboard import Keyboard

WAIT_S = 30.0


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A terminal's other end."""
    other, own = pty.openpty()
    with os.fdopen(own, "r") as file:
        monkeypatch.setattr(sys, "stdin", file)
        yield other
    os.close(other)


@pytest.mark.parametrize(("key", "leaves"), [(b"q", True), (b"Q", True), (b"\x1b", True), (b"x", False)])
def test_some_keys_end_it(terminal: int, key: bytes, leaves: bool) -> None:
    with Keyboard().listening() as keyboard:
        os.write(terminal, key)
        assert keyboard.wants_to_leave(WAIT_S) is leaves
        assert not keyboard.wants_to_leave(0)


def test_the_terminal_is_given_back_as_it_was(terminal: int) -> None:
    before = termios.tcgetattr(sys.stdin.fileno())
    with Keyboard().listening():
        assert termios.tcgetattr(sys.stdin.fileno()) != before
    assert termios.tcgetattr(sys.stdin.fileno()) == before


def test_without_a_terminal_no_key_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with Keyboard().listening() as keyboard:
        assert not keyboard.wants_to_leave(0)


def test_an_interrupt_is_a_wish_to_leave_and_no_exception(terminal: int) -> None:
    former = signal.getsignal(signal.SIGINT)
    with Keyboard().listening() as keyboard:
        assert not keyboard.wants_to_leave(0)
        signal.raise_signal(signal.SIGINT)
        assert keyboard.wants_to_leave(WAIT_S)
        assert keyboard.wants_to_leave(WAIT_S), "whenever it is asked"
    assert signal.getsignal(signal.SIGINT) is former


def test_an_interrupt_ends_the_wait(terminal: int) -> None:
    with Keyboard().listening() as keyboard:
        interrupting = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        interrupting.start()
        assert keyboard.wants_to_leave(3600.0)
        interrupting.join()

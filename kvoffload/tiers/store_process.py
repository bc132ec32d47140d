"""A process with the client library of a store in it, as its parent sees it: commands, answers, and shared memory.

The library runs apart so that nothing it does, and nothing that a store answers, ends or stops the server: a call that
hangs can be ended in no other way, and a library may end its process when it gets no memory. Records pass through
memory that both processes map.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from kvoffload.tiers import store_child
from kvoffload.tiers.record_store import StoreFaultError, one_line
from kvoffload.tiers.store_child import Library
from kvoffload.units import MIB

ANSWER_BYTES = 16 * MIB
"""The longest answer to one command; records are not part of it."""
_BEGIN = (
    "import json, os, sys\n"
    # There is a process for each connection, and each library would start a thread for each processor.
    "os.putenv('OPENBLAS_NUM_THREADS', '1')\n"
    "os.putenv('TOKIO_WORKER_THREADS', '2')\n"
    f"from {store_child.__name__} import Library, main\n"
    "main(Library(**json.loads(sys.argv[1])), int(sys.argv[2]), int(sys.argv[3]))\n"
)
"""The program of the process."""
_END_S = 5.0
"""Time in seconds that a process which has hung up is given to end, so that the reason can be told."""


class StoreProcess:
    """The process of one connection. It belongs to one thread, except for `interrupt`. Its calls raise StoreFaultError;
    after that, only `close` may be called."""

    def __init__(self, library: Library, name: str) -> None:
        """Starts the process. `name`: the client's name in messages."""
        self._name = name
        self._process: subprocess.Popen[bytes] | None = None
        self._memory: npt.NDArray[np.uint8] = np.empty(0, np.uint8)
        with contextlib.ExitStack() as opened:
            try:
                self._memory_fd = os.memfd_create(f"kvoffload-{library.module.rpartition('.')[2]}", os.MFD_CLOEXEC)
                opened.callback(os.close, self._memory_fd)
                self._link, end = socket.socketpair()
                opened.enter_context(self._link)
                with end:
                    self._process = self._start(library, end)
            except OSError as fault:
                raise StoreFaultError(f"{name} cannot be started: {fault.strerror}") from fault
            self._answers = opened.enter_context(self._link.makefile("rb"))
            self._opened = opened.pop_all()
        self._link.settimeout(store_child.START_S)
        try:
            self._read_answer()
        except StoreFaultError:
            self.close()
            raise

    def ask(self, wait_s: float, verb: str, *words: Any) -> Any:
        """Returns the answer to a command, for which the process has `wait_s` seconds."""
        try:
            self._link.settimeout(wait_s)
            self._link.sendall(json.dumps([wait_s, verb, *words]).encode() + b"\n")
        except OSError as fault:
            raise StoreFaultError(self._explain_end()) from fault
        return self._read_answer()

    def ask_each(self, wait_s: float, verb: str, items: list[Any], *words: Any) -> list[Any]:
        """Returns an answer for each item."""
        if not items:
            return []
        answers = self.ask(wait_s, verb, items, *words)
        if not isinstance(answers, list) or len(answers) != len(items):
            raise self.complain()
        return answers

    def take(self, wait_s: float, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Returns the beginning of the shared memory, which is mapped by both. What was there stays there."""
        if size_bytes > len(self._memory):
            size = -(-size_bytes // MIB) * MIB
            try:
                os.ftruncate(self._memory_fd, size)
                self._memory = np.frombuffer(mmap.mmap(self._memory_fd, size), np.uint8)
            except (OSError, OverflowError) as fault:
                raise StoreFaultError(f"{size} bytes cannot be had: {one_line(str(fault))}") from fault
            if self.ask(wait_s, "map", size):
                raise StoreFaultError(f"{size} bytes cannot be registered")
        return self._memory[:size_bytes]

    def complain(self) -> StoreFaultError:
        """Returns the error to raise for an answer of the wrong form."""
        return StoreFaultError(f"{self._name} does not answer as it should")

    def interrupt(self) -> None:
        """Ends the process, from any thread: the call under way fails at once."""
        if self._process is not None:
            self._process.kill()
        with contextlib.suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._opened.close()

    # ---- inside ----

    def _start(self, library: Library, end: socket.socket) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGIN, json.dumps(asdict(library)), str(end.fileno()), str(self._memory_fd)],
            pass_fds=(end.fileno(), self._memory_fd),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _read_answer(self) -> Any:
        try:
            line = self._answers.readline(ANSWER_BYTES)
        except TimeoutError:
            raise StoreFaultError(f"no answer within {self._link.gettimeout():g} s") from None
        except (OSError, ValueError) as fault:
            raise StoreFaultError(self._explain_end()) from fault
        if not line:
            raise StoreFaultError(self._explain_end())
        try:
            told = json.loads(line)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or not told.keys() & {"answer", "fault"}:
            raise self.complain()
        if "fault" in told:
            raise StoreFaultError(one_line(str(told["fault"])))
        return told["answer"]

    def _explain_end(self) -> str:
        """Returns how the process has ended, in one line."""
        ended = f"{self._name} has ended"
        if self._process is None:
            return ended
        with contextlib.suppress(subprocess.TimeoutExpired, ValueError):
            code = self._process.wait(_END_S)
            if code < 0 and code != -signal.SIGKILL:
                return f"{ended}: {signal.Signals(-code).name}"
        return ended

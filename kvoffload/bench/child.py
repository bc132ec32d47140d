"""Processes of their own that a benchmark measures: each runs `main` of one module, and is asked by lines of JSON."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvoffload.errors import BenchmarkError

END_S = 5.0
STOP_POLL_S = 0.001


class Child:
    """Ends with its `with` block, whatever happens in it."""

    def __init__(self, module: str, *arguments: object, enter: Sequence[str] = ()) -> None:
        """Starts a child; `enter`: what its command begins with. BenchmarkError: it did not come so far as to say that
        it is ready."""
        self._module = module
        self._process = subprocess.Popen(
            [
                *enter,
                sys.executable,
                "-P",
                "-c",
                f"import sys, {module} as it; it.main(*sys.argv[1:])",
                *map(str, arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self.answer()
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, *command: object) -> None:
        """Asks, without waiting for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Returns the child's answer. BenchmarkError: it ended instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchmarkError(f"{self._module} ended", remedy="see what it wrote before this line")
        return json.loads(line)

    def ask(self, *command: object) -> Any:
        self.start(*command)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def stop(self) -> None:
        """Comes back when none of its threads runs any more; SIGCONT lets it go on."""
        self.signal(signal.SIGSTOP)
        while not all(_is_stopped(task) for task in Path(f"/proc/{self.pid}/task").iterdir()):
            time.sleep(STOP_POLL_S)

    def kill(self) -> None:
        self._process.kill()
        self._close()

    def close(self) -> None:
        """The end of its input, or SIGTERM, tells it to end; it is killed if it does not."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.wait()
        self._process.stdout.close()


def _is_stopped(task: Path) -> bool:
    """Whether a thread is stopped. Its state comes after its name, which is in brackets."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def say_ready() -> None:
    """The child's first line."""
    print(json.dumps("ready"), flush=True)


def answer_commands(commands: Mapping[str, Callable[..., object]]) -> None:
    """Runs the child's side: answers each line of standard input, until that ends."""
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(commands[name](*arguments)), flush=True)

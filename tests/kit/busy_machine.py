"""Loads that make a machine busy: quotas of processors, processes that spin, and stops of a server now and then."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kvoffload.errors import BenchmarkError

MOUNTS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
EMPTY_S = 10.0
"""How long the end of a group waits for its processes to be gone."""
SPIN = "import signal\nsignal.alarm(1800)\nwhile True: pass"
"""A process that spins ends by itself after half an hour, if nothing else ends it."""
GAPS_S = (1.0, 3.0)
"""The least and the most time between two stops."""


class CpuGroup:
    """A cgroup of its own, of the version that the machine has, for processes that share a quota of processors."""

    def __init__(self, name: str) -> None:
        is_v1 = (MOUNTS / "cpu/cgroup.procs").exists()
        self._mount, self._controller = (MOUNTS / "cpu", "cpu") if is_v1 else (MOUNTS, "")
        self.folder = self._mount / f"kvoffload-busy-{os.getpid()}-{name}"
        self.processes = self.folder / "cgroup.procs"
        self._limit, self._text = ("cpu.cfs_quota_us", "{}") if is_v1 else ("cpu.max", f"{{}} {PERIOD_US}")
        self._unlimited = "-1" if is_v1 else "max"

    @property
    def enter(self) -> tuple[str, ...]:
        """The beginning of a command that shall run in the group."""
        return "sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.processes)

    def limit(self, cpus: float | None) -> None:
        """Lets the group use so many processors. None: as many as there are."""
        quota = self._unlimited if cpus is None else int(cpus * PERIOD_US)
        (self.folder / self._limit).write_text(self._text.format(quota))

    @contextmanager
    def limited_to(self, cpus: float) -> Iterator[None]:
        """The group exists, with this limit. At the end it has none any more, and processes that are still in it are
        killed. BenchmarkError: no such group can be made here."""
        try:
            self.folder.mkdir()
            self.limit(cpus)
        except OSError as fault:
            with suppress(OSError):
                self.folder.rmdir()
            raise BenchmarkError(f"no cgroup with a quota of processors can be made here: {fault}") from fault
        try:
            yield
        finally:
            self.limit(None)
            self._remove()

    @contextmanager
    def holding(self, process: int) -> Iterator[None]:
        """A running process is in the group, and at the end where it was before."""
        rows = [row.split(":", 2) for row in Path(f"/proc/{process}/cgroup").read_text().splitlines()]
        before = next(place for _, names, place in rows if self._controller in names.split(","))
        self.processes.write_text(str(process))
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                (self._mount / before.lstrip("/") / "cgroup.procs").write_text(str(process))

    def _remove(self) -> None:
        until_s = time.monotonic() + EMPTY_S
        while processes := self.processes.read_text().split():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            if time.monotonic() >= until_s:
                break
            time.sleep(0.05)
        self.folder.rmdir()


@contextmanager
def spinning(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Runs so many processes that only compute."""
    processes = []
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", SPIN], stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


@contextmanager
def stopping(process: int, *, seconds: float, count: int) -> Iterator[threading.Thread]:
    """Stops a process for so long, now and then, from the thread that it yields, which ends after so many stops. At the
    end the process runs again."""
    file, ended, chance = os.pidfd_open(process), threading.Event(), random.Random(count)

    def run() -> None:
        for _ in range(count):
            if ended.wait(chance.uniform(*GAPS_S)):
                return
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(file, signal.SIGSTOP)
                ended.wait(seconds)
                signal.pidfd_send_signal(file, signal.SIGCONT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread
    finally:
        ended.set()
        thread.join()
        os.close(file)

"""The benchmark on a busy machine leaves no process, no limit and no group behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from benchmarks.busy.__main__ import main, make_table
from benchmarks.busy.repeats import Repeats
from kvoffload.errors import BenchmarkError
from tests.kit import busy_machine
from tests.kit.busy_machine import CpuGroup, spinning, stopping
from tests.kit.children import child

SLEEPER = ("-c", "import time\nprint('ready', flush=True)\ntime.sleep(600)")
LOADED = """
import signal, sys, time
from benchmarks.ending import end_in_order
from tests.kit.busy_machine import CpuGroup, spinning
signal.signal(signal.SIGTERM, end_in_order)
with CpuGroup("ended").limited_to(1.0), spinning(1) as [process]:
    print(process.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def group() -> Iterator[CpuGroup]:
    group = CpuGroup("test")
    try:
        with group.limited_to(1.5):
            yield group
    except BenchmarkError as fault:
        pytest.skip(str(fault))


def test_a_group_has_its_quota_and_the_processes_that_begin_in_it(group: CpuGroup) -> None:
    assert "150000" in [word for file in group.folder.glob("cpu.*") for word in file.read_text().split()]
    with subprocess.Popen([*group.enter, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("line\n")
        process.stdin.flush()
        assert process.stdout.readline() == "line\n"
        assert group.processes.read_text().split() == [str(process.pid)]


def test_processes_that_are_left_in_a_group_end_with_it(group: CpuGroup) -> None:
    inner = CpuGroup("left")
    with inner.limited_to(1.0):
        process = subprocess.Popen([*inner.enter, sys.executable, *SLEEPER], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not inner.folder.exists()


def test_a_running_process_is_in_the_group_for_a_while_and_then_where_it_was(group: CpuGroup) -> None:
    other = CpuGroup("other")
    with other.limited_to(1.0), subprocess.Popen([*group.enter, "cat"], stdin=subprocess.PIPE) as process:
        while group.processes.read_text().split() != [str(process.pid)]:
            assert process.poll() is None
        with other.holding(process.pid):
            assert (group.processes.read_text(), other.processes.read_text().split()) == ("", [str(process.pid)])
        assert (group.processes.read_text().split(), other.processes.read_text()) == ([str(process.pid)], "")
        process.kill()


def test_processes_that_spin_end_with_their_block() -> None:
    with spinning(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_a_process_that_is_stopped_runs_again_at_the_end() -> None:
    with child(SLEEPER, says="ready") as process:
        with stopping(process.pid, seconds=600, count=1):
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)


def test_a_process_is_stopped_as_often_as_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(busy_machine, "GAPS_S", (0.0, 0.0))
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda file, number: sent.append(number))
    with stopping(os.getpid(), seconds=0, count=3) as stops:
        stops.join()
    assert sent == [signal.SIGSTOP, signal.SIGCONT] * 3


def test_nothing_is_left_after_a_sigterm(group: CpuGroup) -> None:
    with child(["-c", LOADED]) as process:
        assert process.stdout is not None
        file = os.pidfd_open(int(process.stdout.readline()))
        folder = group.folder.with_name(f"kvoffload-busy-{process.pid}-ended")
        assert folder.exists()
        process.terminate()
        assert process.wait() == 128 + signal.SIGTERM
        with pytest.raises(ProcessLookupError):
            signal.pidfd_send_signal(file, 0)
        os.close(file)
        assert not folder.exists()


def test_a_case_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["busy", "--cases", "idle,asleep"])
    with pytest.raises(SystemExit):
        main()


def test_the_table_has_a_line_for_each_case() -> None:
    row = Repeats(
        case="quota 1",
        server="private",
        load=1.0,
        asked=20,
        restored=19,
        reasons={"never_seen": 1},
        cold=(100, 200),
        hit=(10, 20),
        miss=(90, 90),
    )
    table = make_table([row, row])
    assert table.row_count == 2
    assert list(table.columns[3].cells) == ["never_seen 1"] * 2

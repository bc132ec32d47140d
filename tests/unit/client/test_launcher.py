"""A launched command is on its own: no parent, no signal that the engine ignored, no thread that it binds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from kvoffload.client import launcher

SHOW = """
import json, os, signal, sys
blocked = [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())]
wanted = (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
ignored = [int(number) for number in wanted if signal.getsignal(number) is signal.SIG_IGN]
print(json.dumps([os.getpid(), os.getppid(), os.getsid(0), os.getpgrp(), ignored, blocked, sys.argv[1:]]))
"""
SHOW_BINDING = """
import json, os
print(json.dumps([sorted(os.sched_getaffinity(0)), [name for name in os.environ if "OMP" in name or "KMP" in name]]))
"""
ENGINE = """
import signal, subprocess, sys
for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
CPUS = ",".join(map(str, os.sched_getaffinity(0)))


def launch(*command: str) -> subprocess.CompletedProcess[str]:
    """Launches by an engine that ignores and blocks signals. The answer is there when what was launched has ended."""
    engine = [sys.executable, "-c", ENGINE, sys.executable, "-I", "-S", str(Path(launcher.__file__)), CPUS]
    return subprocess.run([*engine, *command], capture_output=True, text=True, check=False)


def test_it_has_no_parent_its_own_process_group_and_all_signals() -> None:
    done = launch(sys.executable, "-c", SHOW, "an argument", "--option")
    assert (done.returncode, done.stderr) == (0, "")
    pid, parent, session, group, ignored, blocked, arguments = json.loads(done.stdout)
    assert group == pid
    # Linux shares the processor between sessions, whatever runs in them: while an engine spins, a server in another
    # session is not run for hundreds of milliseconds.
    assert session == os.getsid(0)
    assert parent != os.getpid()
    assert (ignored, blocked) == ([], [])
    assert arguments == ["an argument", "--option"]


def test_it_may_run_where_the_engine_may_and_is_not_told_to_bind_threads() -> None:
    """vLLM starts its workers on CPUs with such variables, and a thread that starts a server is bound itself."""
    cpus = os.sched_getaffinity(0)
    bound = {"GOMP_CPU_AFFINITY": "0", "KMP_AFFINITY": "compact", "OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
    command = [sys.executable, "-I", "-S", str(Path(launcher.__file__)), CPUS, sys.executable, "-c", SHOW_BINDING]
    os.sched_setaffinity(0, {min(cpus)})
    try:
        done = subprocess.run(command, env={**os.environ, **bound}, capture_output=True, text=True, check=False)
    finally:
        os.sched_setaffinity(0, cpus)
    found, variables = json.loads(done.stdout)
    assert set(found) == cpus
    assert not set(variables) & set(bound)


def test_the_first_process_ends_at_once() -> None:
    said, say = os.pipe()
    go_on, go = os.pipe()
    command = [sys.executable, "-I", "-S", str(Path(launcher.__file__)), CPUS, sys.executable, "-c"]
    command += [f"import os; os.read({go_on}, 1); os.write({say}, b'later')"]
    done = subprocess.run(command, pass_fds=[go_on, say], check=False)
    assert done.returncode == 0
    os.close(say)
    os.write(go, b"1")
    assert os.read(said, 9) == b"later"
    for file in (said, go_on, go):
        os.close(file)


def test_a_command_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = launch(str(tmp_path / "none"))
    assert done.stderr == f"{tmp_path}/none cannot be run: No such file or directory\n"
    assert done.returncode == 0

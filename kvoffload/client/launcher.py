"""Run as a script, `launcher.py CPUS COMMAND ...`: runs the command as a process for which no parent has to wait.

The process that starts this script is its parent for a moment only: no zombie stays with an engine that outlives the
command. The command has no signal ignored or blocked. Nothing but the standard library is imported, and little of that:
it takes a few milliseconds.

The command may run on the processors that CPUS lists, separated by commas. vLLM's workers on CPUs preload OpenMP and
tell it by variables where to bind threads. A command that inherited these would be bound to the processor that a
worker's main thread never leaves idle.

The command has a process group of its own, so Ctrl-C in the engine's terminal does not reach it. It stays in the
engine's session: Linux divides processors between sessions first (autogroups), and a server in a session of its own was
not run for up to 500 ms while vLLM's workers spun in another one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

BINDING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "KMP_HW_SUBSET", "OMP_PLACES", "OMP_PROC_BIND")
"""These make a process bind its threads when it loads OpenMP."""


def launch(cpus: set[int], command: list[str]) -> None:
    """Returns in the process that was started first, and never in the other one."""
    if os.fork():
        return
    try:
        os.setpgid(0, 0)
        # OpenMP has bound this process already. If none of the processors is there any more, that stays so.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cpus)
        for name in BINDING_VARIABLES:
            os.unsetenv(name)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(command[0], command)
    except OSError as fault:
        print(f"{command[0]} cannot be run: {fault.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


if __name__ == "__main__":
    launch({int(cpu) for cpu in sys.argv[1].split(",")}, sys.argv[2:])

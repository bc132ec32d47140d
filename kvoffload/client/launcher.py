"""Run as a script, `launcher.py COMMAND ...`: runs the command as a process that nobody has to wait for.

Whoever starts this one is its parent for a moment only: no zombie stays with an engine that outlives the command. The
command is neither in the engine's session nor in its process group, and has no signal ignored or blocked. Nothing but
the standard library is imported, and little of that: it takes a few milliseconds.
"""

from __future__ import annotations

import os
import signal
import sys


def launch(command: list[str]) -> None:
    """Returns in the process that was started first, and never in the other one."""
    if os.fork():
        return
    try:
        os.setsid()
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execv(command[0], command)
    except OSError as fault:
        print(f"{command[0]} cannot be run: {fault.strerror}", file=sys.stderr, flush=True)
    finally:
        os._exit(127)


if __name__ == "__main__":
    launch(sys.argv[1:])

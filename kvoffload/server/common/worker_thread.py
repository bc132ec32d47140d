"""Threads that start with the server, so that no message has to start them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from kvoffload.errors import ConfigError


def start_worker(name: str) -> ThreadPoolExecutor:
    """Starts the one thread of an executor now, so that no call that is submitted later has to start it.

    ConfigError: the limits of this process allow no further thread.
    """
    pool = ThreadPoolExecutor(1, name)
    try:
        pool.submit(int)
    except RuntimeError as fault:
        remedy = "raise the limit of threads (ulimit -u, pids.max of the cgroup, TasksMax of a systemd unit)"
        raise ConfigError(f"a thread of the server cannot be started: {fault}", remedy=remedy) from fault
    return pool

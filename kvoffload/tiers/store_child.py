"""The process that has a store's client library in it, and nothing else: whatever the library does ends here.

It takes commands as lines of JSON on a socket, and moves records between the store and memory that it shares with its
parent process. The parent kills it when it has waited long enough.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from kvoffload.tiers.record_store import StoreFaultError

START_S = 20.0
"""Time in seconds for this process to start, and for its client to find its store's master."""
EXTRA_S = 10.0
"""Time in seconds beyond the parent's wait after which a call ends this process, in case no parent is left to."""
Verbs = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, kw_only=True)
class Library:
    """A library that this process can load."""

    module: str
    """Module whose `load` takes the descriptor of the shared memory and returns the commands by name. ImportError: the
    library is not there."""
    data_bytes: int
    """Memory that the process may take after its start; the kernel refuses it more, which may end it."""
    data_per_shared: int
    """Bytes beyond that for each byte of the shared memory."""


def data_bytes() -> int:
    """Returns how much memory this process has for itself, as the kernel counts it."""
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[5]) * resource.getpagesize()


def bound_memory(most_bytes: int) -> None:
    """Bounds the memory of this process. Memory that it shares does not count, nor what is only reserved."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes if hard < 0 else min(most_bytes, hard), hard))


def main(library: Library, link_fd: int, memory_fd: int) -> None:
    """Serves one connection until the other end hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A store that makes its client end again and again must not fill a disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most_bytes = data_bytes() + library.data_bytes
    bound_memory(most_bytes)
    link = socket.socket(fileno=link_fd)
    try:
        verbs = import_module(library.module).load(memory_fd)
    except ImportError as fault:
        link.sendall(json.dumps({"fault": str(fault)}).encode() + b"\n")
        return
    link.sendall(b'{"answer": "ready"}\n')
    code = 1
    try:
        for line in link.makefile("rb"):
            wait_s, verb, *words = json.loads(line)
            # Its default is to end the process, which works while a call keeps Python from doing anything.
            signal.setitimer(signal.ITIMER_REAL, wait_s + EXTRA_S)
            if verb == "map":
                bound_memory(most_bytes + library.data_per_shared * words[0])
            try:
                told = {"answer": verbs[verb](*words)}
            except StoreFaultError as fault:
                told = {"fault": str(fault)}
            signal.setitimer(signal.ITIMER_REAL, 0)
            link.sendall(json.dumps(told).encode() + b"\n")
        code = 0
    finally:
        # The library's own clean-up may take for ever, and has no use here.
        os._exit(code)

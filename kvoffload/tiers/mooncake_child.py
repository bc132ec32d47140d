"""A process with a Mooncake client in it, alone: its calls cannot be interrupted, and some stop all of Python.

It is told what to do by lines of JSON on a socket, and moves records between the store and memory that it shares with
whoever started it. Whoever has waited long enough kills it.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import socket
import sys
from collections.abc import Callable
from ctypes import addressof, c_char
from typing import Any

START_S = 20.0
"""For this process to be there, and for its client to know its master."""
EXTRA_S = 10.0
"""A call that lasts so much longer than whoever asked wanted to wait ends the process, should nobody be left to."""


class Child:
    """One client, and the memory that is registered with it."""

    def __init__(self, client: Any, memory_fd: int) -> None:
        self._client = client
        self._memory_fd = memory_fd
        self._view: Any = None
        self._address = 0
        self.verbs: dict[str, Callable[..., Any]] = {
            "setup": self.setup,
            "map": self.map,
            "put": self.put,
            "get": self.get,
            "look": client.batch_is_exist,
            "remove": lambda keys: self._client.batch_remove(keys, True),
        }

    def setup(self, host: str, metadata: str, protocol: str, device: str, master: str) -> int:
        return int(self._client.setup(host, metadata, 0, 16 << 20, protocol, device, master))

    def map(self, size_bytes: int) -> int:
        """The shared memory is so large now."""
        if self._address:
            self._client.unregister_buffer(self._address)
        self._view = (c_char * size_bytes).from_buffer(mmap.mmap(self._memory_fd, size_bytes))
        self._address = addressof(self._view)
        return int(self._client.register_buffer(self._address, size_bytes))

    def put(self, keys: list[str], offsets: list[int], sizes: list[int]) -> list[int]:
        return list(self._client.batch_put_from(keys, self._places(offsets), sizes))

    def get(self, keys: list[str], offsets: list[int], size_bytes: int) -> list[int]:
        return list(self._client.batch_get_into(keys, self._places(offsets), [size_bytes] * len(keys)))

    def _places(self, offsets: list[int]) -> list[int]:
        return [self._address + offset for offset in offsets]


def main(link_fd: int, memory_fd: int, call_timeout_s: float) -> None:
    """Serves one store until the other end hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    link = socket.socket(fileno=link_fd)
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as fault:
        link.sendall(json.dumps({"fault": f"Mooncake's client cannot be loaded: {fault}"}).encode() + b"\n")
        return
    child = Child(MooncakeDistributedStore(), memory_fd)
    link.sendall(b'{"answer": "ready"}\n')
    for line in link.makefile("rb"):
        verb, *rest = json.loads(line)
        # Its default is to end the process, which works while a call keeps Python from doing anything.
        signal.setitimer(signal.ITIMER_REAL, (START_S if verb == "setup" else call_timeout_s) + EXTRA_S)
        answer = child.verbs[verb](*rest)
        signal.setitimer(signal.ITIMER_REAL, 0)
        link.sendall(json.dumps({"answer": answer}).encode() + b"\n")
    # What the client would do at its end may take for ever, and nobody waits for it.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

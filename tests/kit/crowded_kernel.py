"""A kernel that takes no more descriptors on their way."""

from __future__ import annotations

import errno
import socket
from typing import Any

from kvoffload.packets import PacketSocket


class Kernel:
    """While it is crowded, more descriptors are under way than it allows this user."""

    is_crowded = True

    def wrap(self, connected: socket.socket) -> PacketSocket:
        """Returns an end whose descriptors go only while it is not."""
        crowded: Any = _CrowdedSocket(self, connected)
        return PacketSocket(crowded)


class _CrowdedSocket:
    def __init__(self, kernel: Kernel, end: socket.socket) -> None:
        self._kernel = kernel
        self._end = end

    def sendmsg(self, data: list[bytes], beside: list[Any], flags: int) -> int:
        if beside and self._kernel.is_crowded:
            raise OSError(errno.ETOOMANYREFS, "too many references")
        return self._end.sendmsg(data, beside, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end, name)

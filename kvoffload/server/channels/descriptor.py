"""A descriptor that came with a message: taken by whoever needs it, or closed."""

from __future__ import annotations

from kvoffload.packets import close_all


class ReceivedDescriptor:
    """Closed with the object, unless it was taken."""

    def __init__(self, number: int) -> None:
        self._number = number

    def take(self) -> int:
        """The descriptor, which is the caller's from now on."""
        number, self._number = self._number, -1
        return number

    def close(self) -> None:
        """Nothing, if it was taken or closed before."""
        number = self.take()
        if number >= 0:
            close_all([number])

    def __del__(self) -> None:
        self.close()

"""Descriptors that were sent to processes and have not been read: the kernel limits how many the server's user may
have."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.packets import PacketSocket
from kvoffload.server.channels.open_files import count_allowed
from kvoffload.server.common.shares import has_share


@dataclass(eq=False)
class _Unread:
    end: PacketSocket
    uid: int
    count: int
    left_bytes: int
    since_s: float | None = None
    """Time at which the process was first seen not to have read anything, or None if it has not been."""


class UnreadDescriptors:
    """Counts what is unread by lifeline; of one user at most a share. Belongs to the thread of the event loop.

    Which of them were read the kernel does not tell, so they count until all that was sent has been.
    """

    def __init__(self) -> None:
        self._by_line: dict[int, _Unread] = {}

    def __len__(self) -> int:
        return sum(one.count for one in self._by_line.values())

    def may_send(self, uid: int, count: int) -> bool:
        """Whether so many more may be sent to a process of this user. One packet always may, if it is the only one."""
        if self._has_room(uid, count):
            return True
        for line, one in list(self._by_line.items()):
            if not one.end.count_unread_bytes():
                del self._by_line[line]
        return self._has_room(uid, count)

    def note_sent(self, line: int, uid: int, end: PacketSocket, count: int) -> None:
        one = self._by_line.setdefault(line, _Unread(end, uid, 0, 0))
        one.count += count
        one.left_bytes = end.count_unread_bytes()

    def forget(self, line: int) -> None:
        """Forgets a lifeline that has ended: the kernel has closed its descriptors."""
        self._by_line.pop(line, None)

    def find_silent(self, now_s: float, *, silence_s: float) -> int | None:
        """Returns a lifeline that has read nothing for `silence_s`, of the user who has the most unread descriptors;
        None: there is none. The caller repeats the call as long as descriptors wait to be sent."""
        silent: list[tuple[int, int, int]] = []
        for line, one in list(self._by_line.items()):
            left_bytes = one.end.count_unread_bytes()
            if not left_bytes:
                del self._by_line[line]
                continue
            if one.since_s is None or left_bytes < one.left_bytes:
                one.since_s = now_s
            one.left_bytes = left_bytes
            if now_s - one.since_s >= silence_s:
                silent.append((self._count(one.uid), one.count, line))
        return max(silent)[-1] if silent else None

    def _has_room(self, uid: int, count: int) -> bool:
        of_user = self._count(uid)
        return not of_user or has_share(of_user + count - 1, total=len(self) + count - 1, limit=count_allowed())

    def _count(self, uid: int) -> int:
        return sum(one.count for one in self._by_line.values() if one.uid == uid)

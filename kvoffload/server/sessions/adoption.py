"""Decides whether a server wants the memory of an old one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvoffload.protocol import Adopt, AdoptVerdict
from kvoffload.server.sessions.session import EngineSession

_User: TypeAlias = tuple[str, int]
"""A domain's name, and the number of one of its users."""


@dataclass(frozen=True)
class _Wanted:
    """The memory of a former server that a session was asked for."""

    session: EngineSession
    boot_id: int
    segments: int
    """Number of segments that the engine says the memory has."""


class Adoption:
    """Belongs to the thread of the server's core. The first usable offer of each of a domain's users is wanted, and the
    first memory that turns out to be usable is adopted. So a user who promises memory and sends none, or sends
    something else, does not block the adoption of another user's memory.

    The same memory may be offered by all processes of an engine; one of them sends it.
    """

    def __init__(self) -> None:
        self._wanted: dict[_User, _Wanted] = {}
        self._refused: dict[_User, tuple[int, AdoptVerdict]] = {}
        """The boot id of the memory that each user last offered and that could not be adopted, and why."""

    def judge(self, session: EngineSession, message: Adopt) -> AdoptVerdict:
        """Returns the answer to an adopt. After WANTED, no other offer of this user is wanted until `refuse` or the
        session's end."""
        domain, user = session.domain, _user_of(session)
        wanted = self._wanted.get(user)
        if domain.cache is not None or (wanted is not None and wanted.session.is_open):
            return AdoptVerdict.HAS_MEMORY
        boot_id, verdict = self._refused.get(user, (0, AdoptVerdict.NOT_USABLE))
        if boot_id == message.former_boot_id:
            return verdict
        if not _is_usable(domain.settings.memory_bytes, message):
            return AdoptVerdict.NOT_USABLE
        self._wanted[user] = _Wanted(session, message.former_boot_id, len(message.segment_sizes) // 8)
        return AdoptVerdict.WANTED

    def is_wanted(self, session: EngineSession, former_boot_id: int) -> bool:
        """Whether an offer is the one that was asked for."""
        wanted = self._find(session)
        return session.is_open and wanted is not None and wanted.boot_id == former_boot_id

    def count_segments(self, session: EngineSession) -> int:
        """Returns the number of segments that the memory is said to have that this session was asked for; 0: it was
        asked for none."""
        wanted = self._find(session)
        return 0 if wanted is None else wanted.segments

    def refuse(self, session: EngineSession, verdict: AdoptVerdict) -> None:
        """Notes that what this session sent could not be adopted. Its user is not asked for that memory again."""
        wanted = self._find(session)
        if wanted is not None:
            user = _user_of(session)
            del self._wanted[user]
            # Remembering the last one is enough: an engine has at most one old memory, and other offers are judged
            # afresh.
            self._refused[user] = wanted.boot_id, verdict

    def forget(self, domain: str) -> None:
        """Forgets the offers of a domain that has its memory."""
        for known in (self._wanted, self._refused):
            for user in [user for user in known if user[0] == domain]:
                del known[user]

    def _find(self, session: EngineSession) -> _Wanted | None:
        wanted = self._wanted.get(_user_of(session))
        return wanted if wanted is not None and wanted.session is session else None


def _user_of(session: EngineSession) -> _User:
    return session.domain.name, session.uid


def _is_usable(memory_bytes: int, message: Adopt) -> bool:
    sizes = np.frombuffer(message.segment_sizes, "<u8")
    if not len(sizes) or not message.former_boot_id or not message.index_bytes:
        return False
    # Addresses count over all segments, so all have one size.
    is_even = bool(sizes[0]) and bool((sizes == sizes[0]).all())
    return is_even and memory_bytes in (0, int(sizes[0]) * len(sizes))

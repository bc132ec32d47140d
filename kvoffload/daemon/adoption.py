"""Whether a server wants the memory of an old one."""

from __future__ import annotations

import numpy as np

from kvoffload.daemon.domain import Domain
from kvoffload.daemon.session import EngineSession
from kvoffload.protocol import Adopt, AdoptVerdict


class AdoptionDesk:
    """Belongs to the thread of the server's core. The first usable offer of a domain is wanted, the others are not.

    The same memory may be offered by all processes of an engine; one of them sends it.
    """

    def __init__(self) -> None:
        self._wanted: dict[str, tuple[EngineSession, int]] = {}
        """By domain: the session that was asked for its memory, and the boot id of it."""
        self._segments: dict[str, int] = {}
        """The memory that a domain wants is said to have so many segments."""
        self._refused: dict[int, AdoptVerdict] = {}
        """By boot id: what was tried, and was not to be had."""

    def judge(self, session: EngineSession, message: Adopt) -> AdoptVerdict:
        """The answer to an adopt; if it is WANTED, nobody else's offer is until `give_up` or the session's end."""
        domain = session.domain
        asked, _ = self._wanted.get(domain.name, (None, 0))
        if domain.cache is not None or (asked is not None and asked.is_open):
            return AdoptVerdict.HAS_MEMORY
        refused = self._refused.get(message.former_boot_id)
        if refused is not None:
            return refused
        if not _is_usable(domain.terms.memory_bytes, message):
            return AdoptVerdict.NOT_USABLE
        self._wanted[domain.name] = (session, message.former_boot_id)
        self._segments[domain.name] = len(message.segment_sizes) // 8
        return AdoptVerdict.WANTED

    def is_wanted(self, session: EngineSession, former_boot_id: int) -> bool:
        """Whether an offer is the one that was asked for."""
        return session.is_open and self._wanted.get(session.domain.name) == (session, former_boot_id)

    def count_segments(self, domain: Domain) -> int:
        """The memory that this domain wants is said to have so many; 0: it wants none."""
        return self._segments.get(domain.name, 0)

    def give_up(self, domain: Domain, verdict: AdoptVerdict | None = None) -> None:
        """What was wanted did not come; with a verdict it came and was no use, and is not asked for again."""
        _, boot_id = self._wanted.pop(domain.name, (None, 0))
        # The last one is enough to remember: an engine has at most one old memory, and others are judged anew.
        if verdict is not None and boot_id:
            self._refused = {boot_id: verdict}


def _is_usable(memory_bytes: int, message: Adopt) -> bool:
    sizes = np.frombuffer(message.segment_sizes, "<u8")
    if not len(sizes) or not message.former_boot_id or not message.index_bytes:
        return False
    # Addresses count over all segments, so all have one size.
    is_even = bool(sizes[0]) and bool((sizes == sizes[0]).all())
    return is_even and memory_bytes in (0, int(sizes[0]) * len(sizes))

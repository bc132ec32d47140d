"""Last names of prefixes that the server was told to keep, so that it lets go of those that nobody can find again."""

from __future__ import annotations

from collections import deque

from kvoffload.client import HintTerms
from kvoffload.protocol import HintAction
from kvoffload.types import HASH_BYTES

MAX_PREFIXES = 4096
"""That are remembered, as many as a domain keeps. The oldest are forgotten: they end with their time."""
LAST_NAMES = 64
"""Of each prefix: of one that was not all there the server keeps what ends a little earlier."""
AT_ONCE = 64
"""Prefixes that one hint lets go."""


class KeptNames:
    """Owned by the scheduler's thread. Prefixes are let go by their names and never by their sessions, which may have
    other prefixes since, with new weights or on another engine."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str | bytes], bytes] = {}
        """By the tenant, and the session or the prefix."""
        self._doubtful: dict[tuple[str, str | bytes], bytes] = {}
        """Nobody finds them, unless the weights turn out to be the same."""
        self._lost: deque[tuple[str, bytes]] = deque(maxlen=MAX_PREFIXES)

    def __len__(self) -> int:
        """Prefixes that the server has yet to let go."""
        return len(self._lost)

    def note(self, terms: HintTerms) -> None:
        """The server is told to keep this prefix."""
        names = bytes(memoryview(terms.chain)[-LAST_NAMES * HASH_BYTES :])
        if not names:
            return
        key = terms.tenant, terms.session or names[-HASH_BYTES:]
        self._kept.pop(key, None)
        self._kept[key] = names
        if len(self._kept) > MAX_PREFIXES:
            del self._kept[next(iter(self._kept))]

    def doubt(self) -> None:
        """Names are others from now on. Those of before the last time are not taken back any more."""
        self.settle(are_same=False)
        self._doubtful, self._kept = self._kept, {}

    def settle(self, *, are_same: bool) -> None:
        """Whether names are again what they were before they became others."""
        if are_same:
            self._kept = dict(list((self._doubtful | self._kept).items())[-MAX_PREFIXES:])
        else:
            self._lost.extend((tenant, names) for (tenant, _), names in self._doubtful.items())
        self._doubtful = {}

    def take(self) -> HintTerms:
        """Returns what the server is to be told next. There is something."""
        tenant, names = self._lost.popleft()
        found = [names]
        while self._lost and self._lost[0][0] == tenant and len(found) < AT_ONCE:
            found.append(self._lost.popleft()[1])
        return HintTerms(action=HintAction.RELEASE, chain=b"".join(found), tenant=tenant)

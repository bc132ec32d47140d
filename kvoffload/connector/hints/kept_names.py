"""Last names of prefixes that the server was told to keep, so that it releases those that cannot be found again."""

from __future__ import annotations

from collections import deque

from kvoffload.client import HintSettings
from kvoffload.protocol import HintAction
from kvoffload.types import HASH_BYTES

MAX_PREFIXES = 4096
"""Maximum number of remembered prefixes, as many as a domain keeps. The oldest are forgotten, and expire by
themselves."""
LAST_NAMES = 64
"""Number of names remembered of each prefix: if its end was not stored, the server keeps a part that ends earlier."""
AT_ONCE = 64
"""Maximum number of prefixes that one hint releases."""


class KeptNames:
    """Owned by the scheduler's thread. Prefixes are released by their names and never by their sessions, which may have
    other prefixes by now, with new weights or on another engine."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str | bytes], bytes] = {}
        """The last names of kept prefixes, by tenant, and session or prefix."""
        self._doubtful: dict[tuple[str, str | bytes], bytes] = {}
        """Prefixes that cannot be found unless the weights turn out to be the same."""
        self._lost: deque[tuple[str, bytes]] = deque(maxlen=MAX_PREFIXES)

    def __len__(self) -> int:
        """Returns the number of prefixes that the server has yet to be told to release."""
        return len(self._lost)

    def note(self, settings: HintSettings) -> None:
        """Notes a prefix that the server is told to keep."""
        names = bytes(memoryview(settings.chain)[-LAST_NAMES * HASH_BYTES :])
        if not names:
            return
        key = settings.tenant, settings.session or names[-HASH_BYTES:]
        self._kept.pop(key, None)
        self._kept[key] = names
        if len(self._kept) > MAX_PREFIXES:
            del self._kept[next(iter(self._kept))]

    def doubt(self) -> None:
        """Notes that blocks have other names from now on. Names from before the last such change are given up."""
        self.settle(are_same=False)
        self._doubtful, self._kept = self._kept, {}

    def settle(self, *, are_same: bool) -> None:
        """Settles the doubtful prefixes: kept again if blocks have the same names as before (`are_same`), else lost."""
        if are_same:
            self._kept = dict(list((self._doubtful | self._kept).items())[-MAX_PREFIXES:])
        else:
            self._lost.extend((tenant, names) for (tenant, _), names in self._doubtful.items())
        self._doubtful = {}

    def take(self) -> HintSettings:
        """Takes the next hint for the server, to release prefixes. There must be some."""
        tenant, names = self._lost.popleft()
        found = [names]
        while self._lost and self._lost[0][0] == tenant and len(found) < AT_ONCE:
            found.append(self._lost.popleft()[1])
        return HintSettings(action=HintAction.RELEASE, chain=b"".join(found), tenant=tenant)

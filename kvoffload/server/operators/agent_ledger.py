"""What agents' sessions got of the cache, turn by turn: the requests of one name."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice

from kvoffload.protocol import AgentSession, AgentSessions, Query
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.limits import ARRAY_ITEMS

MAX_AGENTS = 1024
"""Sessions that are remembered: beyond it the one whose last turn is the longest ago is forgotten."""


class AgentLedger:
    """Counts for one domain. Belongs to the thread of the server's core."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, AgentSession] = OrderedDict()
        """The one with the latest turn last."""

    def take(self, query: Query) -> None:
        """Counts a turn. Engines say what they like, and it has to fit an answer."""
        before = self._by_name.pop(query.session, None)
        if before is None and len(self._by_name) >= MAX_AGENTS:
            self._by_name.popitem(last=False)
        promised = min(query.promised, query.asked)
        counted = AgentSession(
            name=query.session,
            turns=1,
            asked=query.asked,
            promised=promised,
            lower=min(query.lower, promised),
            saved_us=query.saved_us,
        )
        self._by_name[query.session] = counted if before is None else _add(before, counted)

    def list_from(self, first: int) -> AgentSessions:
        """As many as fit a message, from this one on, counted from the latest."""
        return AgentSessions(
            total=len(self._by_name),
            sessions=tuple(islice(reversed(self._by_name.values()), first, first + ARRAY_ITEMS)),
        )


def _add(before: AgentSession, turn: AgentSession) -> AgentSession:
    return AgentSession(
        name=before.name,
        turns=before.turns + 1,
        asked=min(before.asked + turn.asked, U64_MAX),
        promised=min(before.promised + turn.promised, U64_MAX),
        lower=min(before.lower + turn.lower, U64_MAX),
        saved_us=min(before.saved_us + turn.saved_us, U64_MAX),
    )

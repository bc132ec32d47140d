"""Counts what each agent's session, which is the requests of one name, got from the cache, turn by turn."""

from __future__ import annotations

from collections import Counter, OrderedDict
from itertools import islice

from kvoffload.protocol import AgentSession, AgentSessions, Query
from kvoffload.protocol.fields import U64_MAX
from kvoffload.protocol.limits import ARRAY_ITEMS

MAX_AGENTS = 1024
"""Number of sessions that are remembered. Beyond it the payer with the most loses the one whose last turn is the
longest ago."""


class AgentLedger:
    """Counts for one domain. Belongs to the thread of the server's core."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, AgentSession] = OrderedDict()
        """Counts by session name. The session with the latest turn comes last."""
        self._payers: dict[str, str] = {}
        """The tenant or user that named each session first, by session name."""
        self._counts: Counter[str] = Counter()
        """Number of sessions of each payer."""

    def take(self, query: Query, payer: str = "") -> None:
        """Counts a turn. Numbers are cut to what fits an answer, as engines may send any."""
        before = self._by_name.pop(query.session, None)
        if before is None:
            self._payers[query.session] = payer
            self._counts[payer] += 1
            self._forget_one()
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

    def _forget_one(self) -> None:
        """Forgets a session if one more would be too many."""
        if len(self._by_name) < MAX_AGENTS:
            return
        most = max(self._counts, key=self._counts.__getitem__)
        name = next(name for name in self._by_name if self._payers[name] == most)
        del self._by_name[name], self._payers[name]
        self._counts -= Counter((most,))

    def list_from(self, first: int) -> AgentSessions:
        """Returns as many sessions as fit a message, from number `first` on, counted from the latest."""
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

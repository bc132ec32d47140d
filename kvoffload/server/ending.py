"""When a private server ends by itself: its last engine has ended, or none has come, and nobody came since."""

from __future__ import annotations

from dataclasses import dataclass

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class EndingTerms:
    """How long it is there for nobody."""

    linger_s: float
    """When its last engine has ended: a new one finds the cache again."""
    first_engine_s: float
    """From its start on."""


class Ending:
    """Belongs to the thread of the event loop."""

    def __init__(self, terms: EndingTerms, now_ns: int) -> None:
        self._terms = terms
        self._until_ns: int | None = now_ns + int(terms.first_engine_s * _NS_PER_S)
        """None: it is used."""

    def is_due(self, now_ns: int, *, is_used: bool) -> bool:
        """To be asked again and again, and whenever an engine has come: one that was not seen here was none."""
        if is_used:
            self._until_ns = None
        elif self._until_ns is None:
            self._until_ns = now_ns + int(self._terms.linger_s * _NS_PER_S)
        return self._until_ns is not None and now_ns >= self._until_ns

"""The prompts that an engine asked for. Each one's outcome is sent to the server once, which counts the prompts of all
engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvoffload.client import PromptNote
from kvoffload.protocol import Miss

TELL_AFTER_S = 1.0
"""A request that has not been asked for again by then is computed, or loads what it was told of."""
MAX_ASKED = 1024
"""How many prompts are held back. Beyond that, the one that was asked for longest ago is told to the server."""


@dataclass(frozen=True, kw_only=True)
class _Asked:
    names: bytes
    """Names of those pages that the engine does not have itself."""
    pages: int
    found: int
    miss: Miss
    at_s: float


class AskedPrompts:
    """Owned by the scheduler's thread. The engine asks as often as it likes, and of one request the last answer counts.

    Tokens are those of whole pages, and the engine's own ones are not among them: it does not say how many it has.
    """

    def __init__(
        self,
        tell: Callable[[PromptNote], None],
        *,
        page_size: int,
        note_computed: Callable[[str, Miss], None] = lambda _, __: None,
    ) -> None:
        """`note_computed` hears of requests whose pages were not all found, and why."""
        self._tell = tell
        self._note_computed = note_computed
        self._page_size = page_size
        self._asked: dict[str, _Asked] = {}
        """By request, the one that was asked for longest ago first."""

    def note(self, rid: str, names: bytes, *, pages: int, found: int, miss: Miss, now_s: float) -> None:
        """Notes how many of a request's pages were found, and why no more were."""
        self._asked.pop(rid, None)
        self._asked[rid] = _Asked(names=names, pages=pages, found=found, miss=miss, at_s=now_s)
        if len(self._asked) > MAX_ASKED:
            self.end(next(iter(self._asked)))

    def note_again(self, rid: str, now_s: float) -> None:
        """Notes that a waiting request asked again and got the same answer."""
        asked = self._asked.pop(rid, None)
        if asked is not None:
            self._asked[rid] = replace(asked, at_s=now_s)

    def end(self, rid: str, *, is_loaded: bool = True) -> None:
        """It is known what became of it."""
        asked = self._asked.pop(rid, None)
        if asked is None:
            return
        found, miss = (asked.found, asked.miss) if is_loaded else (0, Miss.REFUSED)
        if found < asked.pages:
            self._note_computed(rid, miss)
        self._tell(
            PromptNote(
                chain=asked.names,
                local=0,
                tokens=asked.pages * self._page_size,
                boundary=found * self._page_size,
                limit=asked.pages * self._page_size,
                miss=miss,
            )
        )

    def end_old(self, now_s: float) -> None:
        """Ends prompts that were not asked for again for `TELL_AFTER_S`, and sends their outcomes. To be called
        regularly."""
        while self._asked:
            rid, asked = next(iter(self._asked.items()))
            if now_s - asked.at_s < TELL_AFTER_S:
                return
            self.end(rid)

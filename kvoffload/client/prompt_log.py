"""Outcomes of prompts on their way to the server: one message carries many, and no caller waits for it. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvoffload.cache import Publication
from kvoffload.client.lanes import Pending
from kvoffload.client.link import Link
from kvoffload.client.settings import SECOND_NS
from kvoffload.hash_rows import as_rows
from kvoffload.protocol import Explain, Explained, Explanation, Miss, Query, Register
from kvoffload.protocol.insight import MAX_TAGS, TAG_BYTES
from kvoffload.protocol.limits import MAX_QUERIES
from kvoffload.types import HASH_BYTES, ReuseRule

SEND_AFTER_NS = SECOND_NS // 5
SAVED_AFTER_NS = 5 * SECOND_NS
"""Nanoseconds after which the server is told of saved bytes even if there was no prompt."""
MESSAGE_BYTES = 128 << 10
"""Approximate limit of the tags in one message: it is packed while an engine's step may wait for the lock."""
_MOST = 2**32 - 1
MAX_QUEUED = 4 * MAX_QUERIES
"""The most notes that wait. Beyond it the oldest are dropped, without being counted anywhere."""


@dataclass(frozen=True, kw_only=True)
class PromptNote:
    """The request of a prompt and its outcome. Tokens before `local` are in the engine's own cache."""

    chain: bytes
    local: int
    tokens: int
    """Number of tokens of the prompt."""
    boundary: int
    """Number of tokens up to which a hit was promised."""
    limit: int
    """Number of tokens up to which a hit could have been promised."""
    lower: int = 0
    """Number of tokens that were promised from slower tiers."""
    saved_us: int = 0
    miss: Miss = Miss.NEVER_SEEN
    session: str = ""
    """The agent's session of which the prompt is a turn; empty: none."""
    tenant: str = ""
    """The tenant that the request names; empty: the engine's own."""
    on_explained: Callable[[Explanation], None] | None = None
    """Hears the server's view, if there is one, on any thread; it must not call the client."""


class PromptLog:
    """The notes that wait for the next message. The caller holds the client's lock."""

    def __init__(self, link: Link, register: Register) -> None:
        self._link = link
        prefixes = [at for at, group in enumerate(register.groups) if group.reuse is ReuseRule.PREFIX]
        self._group = prefixes[0] if prefixes else 0
        self._block_size = register.groups[self._group].block_size
        self._hash_block_size = register.hash_block_size
        self._queue: deque[tuple[int, PromptNote]] = deque(maxlen=MAX_QUEUED)
        """The notes, each with the time at which it came."""
        self._asked: Pending | None = None
        self._record_bytes = [group.record_bytes for group in register.groups]
        self._saved: Counter[str] = Counter()
        """Bytes that the engine has saved and the server was not told of, by tenant. Those of the engine's own tenant,
        and of tenants that it may not name, are under ""."""
        self._saved_ns = 0
        """The time at which the first of them came."""

    def note_saved(self, publication: Publication, now_ns: int) -> None:
        """Adds the bytes of published records to the next message."""
        slots = publication.slots
        if not self._saved:
            self._saved_ns = now_ns
        tenant = publication.tenant if publication.tenant in self._link.tenants else ""
        records = int(np.count_nonzero(slots.tickets)) * publication.shards
        self._saved[tenant] += records * self._record_bytes[slots.group]

    def note(self, note: PromptNote, now_ns: int) -> None:
        """Adds a note to the next message."""
        self._queue.append((now_ns, note))

    def send(self, now_ns: int, wait_ns: int) -> None:
        """Sends the notes that are due. The client calls it now and then."""
        is_due = (
            len(self._queue) >= MAX_QUERIES
            or (self._queue and now_ns - self._queue[0][0] >= SEND_AFTER_NS)
            or (self._saved and now_ns - self._saved_ns >= SAVED_AFTER_NS)
        )
        if not is_due or not self._link.has("explain") or (self._asked is not None and not self._asked.is_over):
            return
        notes: list[PromptNote] = []
        queries: list[Query] = []
        tag_bytes = 0
        while self._queue and len(queries) < MAX_QUERIES and tag_bytes < MESSAGE_BYTES:
            then_ns, note = self._queue.popleft()
            notes.append(note)
            queries.append(self._describe(note, now_ns - then_ns))
            tag_bytes += len(queries[-1].tags)
        message = Explain(queries=tuple(queries), saved_bytes=self._take_saved())
        asked = self._asked = self._link.ask(message, now_ns, wait_ns)
        asked.when_over(lambda: _hand_out(notes, asked))

    def _take_saved(self) -> bytes:
        """Returns the saved bytes by tenant as `explain` has them."""
        places = self._link.tenants
        found = np.zeros(len(places) + 1 if self._saved else 0, "<u8")
        for tenant, size_bytes in self._saved.items():
            found[places.get(tenant, 0)] += size_bytes
        self._saved.clear()
        return found.tobytes()

    def _describe(self, note: PromptNote, age_ns: int) -> Query:
        first = note.local // self._hash_block_size
        hashes = as_rows(note.chain)[first : first + MAX_TAGS]
        return Query(
            asked=_fit(note.tokens - note.local),
            promised=_fit(note.boundary - note.local),
            lower=_fit(note.lower),
            saved_us=max(note.saved_us, 0),
            age_ms=_fit(age_ns // 1_000_000),
            miss=note.miss,
            group=self._group,
            missing=self._find_missing(note),
            tags=hashes[:, :TAG_BYTES].tobytes(),
            session=note.session,
            tenant=self._link.tenants.get(note.tenant, 0),
        )

    def _find_missing(self, note: PromptNote) -> bytes:
        """Returns the hash of the first block that was not promised and could have been; empty: there is none."""
        if note.boundary >= note.limit:
            return b""
        end = (note.boundary // self._block_size + 1) * self._block_size // self._hash_block_size * HASH_BYTES
        return bytes(note.chain[end - HASH_BYTES : end]) if end <= len(note.chain) else b""


def _fit(count: int) -> int:
    """Clamps a count of an engine to what a message's field can hold."""
    return min(max(count, 0), _MOST)


def _hand_out(notes: list[PromptNote], asked: Pending) -> None:
    if not isinstance(asked.answer, Explained):
        return
    for note, explanation in zip(notes, asked.answer.answers, strict=False):
        if note.on_explained is not None:
            note.on_explained(explanation)

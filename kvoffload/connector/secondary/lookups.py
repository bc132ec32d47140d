"""Finds which chunks the cache has, for requests that ask vLLM's tiers again every step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from kvoffload.cache import Ask
from kvoffload.client import PendingAcquire, TierWait
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.secondary.transfers import GROUP, SHARD, TransferSettings

QUESTION_LIMIT = 1024
"""Maximum number of questions, over all requests, that wait for tiers slower than memory. Further chunks are misses."""
WINDOW_LIMIT = 64
"""Maximum number of chunks of a window's or state's group that are asked for at once, from the end of a prompt on. A
window that lies before them is not found in slower tiers."""


@dataclass(eq=False)
class _Request:
    asked: set[bytes] = field(default_factory=set)
    """Names of chunks for which slower tiers were asked; each is asked for once."""
    unanswered: set[bytes] = field(default_factory=set)
    unsent: defaultdict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    """Names to ask for at the end of the step, by group."""
    questions: list[tuple[list[bytes], PendingAcquire]] = field(default_factory=list)
    lost: set[bytes] = field(default_factory=set)


class TierLookups:
    """Runs on the same thread as the transfers, and never waits.

    Chunks in memory are found at once. Slower tiers are asked once for each request and chunk, and the request waits
    for them as long as the settings say.
    """

    def __init__(self, cache: CacheClient, settings: TransferSettings, *, prefix_groups: Set[int]) -> None:
        """`prefix_groups` are the groups whose chunks are useless without all those before them. vLLM looks these up
        from the first one on, and those of other groups from the last one back, whose neighbours may not be there."""
        self._cache = cache
        self._prefix_groups = prefix_groups
        self._settings = settings
        self._requests: dict[str, _Request] = {}
        self._questions = 0

    @property
    def requests(self) -> int:
        """Number of requests with look-ups."""
        return len(self._requests)

    @property
    def questions(self) -> int:
        """Number of questions that the tiers have not answered yet."""
        return self._questions

    def look(self, request_id: str, group: int, name: bytes) -> bool | None:
        """Returns whether the cache can load a chunk; None: that is not known yet."""
        request = self._requests.get(request_id)
        if request is None:
            request = self._requests[request_id] = _Request()
        if not self._cache.is_served or name in request.lost:
            return False
        if name in request.unanswered:
            return None
        if self._cache.lookup(GROUP, name)[0]:
            return True
        if not (self._cache.has_tiers and self._settings.promote_wait_s):
            return False
        if name in request.asked:
            return False
        request.asked.add(name)
        request.unanswered.add(name)
        request.unsent[group].append(name)
        return None

    def send(self) -> None:
        """Asks slower tiers for all chunks that the step's look-ups have not found. Called at the end of a step."""
        for request in self._requests.values():
            for group, names in request.unsent.items():
                self._ask(request, [names] if group in self._prefix_groups else [[name] for name in names])
            request.unsent.clear()

    def harvest(self) -> None:
        """Takes the tiers' answers, at the beginning of a step. Promoted chunks are then looked up again, and loaded;
        the server keeps them for half a second."""
        for request in self._requests.values() if self._questions else ():
            for names, pending in list(request.questions):
                if self._cache.poll(pending) is not None:
                    self._end(request, names, pending)

    def note_lost(self, request_id: str, names: Iterable[bytes]) -> None:
        """Notes chunks whose load has failed, so that the request, if it still runs, does not try again."""
        if request_id in self._requests:
            self._requests[request_id].lost.update(names)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended."""
        request = self._requests.pop(request_id, None)
        for names, pending in list(request.questions) if request is not None else ():
            assert request is not None
            self._end(request, names, pending)

    def clear(self) -> None:
        """Forgets all requests, because chunks have other names from now on."""
        for request_id in list(self._requests):
            self.forget(request_id)

    def _ask(self, request: _Request, chains: list[list[bytes]]) -> None:
        for place, names in enumerate(chains):
            if self._questions >= QUESTION_LIMIT or place >= WINDOW_LIMIT:
                request.unanswered.difference_update(names)
                continue
            pending = self._cache.start_acquire(
                Ask(
                    b"".join(names),
                    limit=len(names) * self._settings.block_tokens,
                    alignment=self._settings.block_tokens,
                    shards=(SHARD,),
                ),
                far=TierWait(wait_s=self._settings.promote_wait_s),
            )
            request.questions.append((names, pending))
            self._questions += 1

    def _end(self, request: _Request, names: list[bytes], pending: PendingAcquire) -> None:
        self._cache.cancel(pending)
        request.questions.remove((names, pending))
        request.unanswered.difference_update(names)
        self._questions -= 1

"""Sends the hints of requests to the server: some when a request arrives, others after its end."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvoffload.client import HintSettings
from kvoffload.connector.common.cache_client import CacheClient
from kvoffload.connector.common.envelope import Wish, read_envelope
from kvoffload.connector.common.group_table import GroupTable
from kvoffload.connector.common.request_settings import RequestSettings
from kvoffload.connector.common.tracked_request import TrackedRequest
from kvoffload.connector.engine.measures import Measures
from kvoffload.connector.hints.kept_names import KeptNames
from kvoffload.connector.saves.saves import Saves
from kvoffload.protocol import HintAction, Hinted
from kvoffload.protocol.hints import ACTION_TYPES
from kvoffload.types import HASH_BYTES

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Maximum number of prefixes that wait for their blocks to be saved. Further ones are not retained."""
MAX_STEPS = 400
"""Maximum number of steps that a prefix waits for its blocks to be saved."""
PIECE_TOKENS = 8192
"""Number of a prompt's tokens after which the server is told to retain the blocks computed by then."""
MAX_NAMES = 16
"""Maximum number of unknown types of actions that are counted by name; further ones are counted as `other`."""
MAX_ANSWERS = 1024
"""Maximum number of answers that are remembered until they are counted."""
SAY_EVERY_S = 60.0
"""Minimum number of seconds between log lines about faulty envelopes."""
OTHER = "other"
_NAMES = {action: name for name, action in ACTION_TYPES.items()}
_AT_ONCE = frozenset({HintAction.PREFETCH, HintAction.PRIORITISE, HintAction.HAND_OVER})
_BY_NAME = frozenset({HintAction.PRIORITISE, HintAction.RELEASE})
"""The actions that apply to a session, if it is named, whatever its prefix is."""
_KEEPING = frozenset({HintAction.RETAIN, HintAction.HAND_OVER})


@dataclass(eq=False)
class _Ended:
    """A prefix that the server is told to retain once it has been saved."""

    settings: HintSettings
    steps: int = 0
    last_job: int = 0

    def is_of(self, tenant: str, session: str) -> bool:
        """Whether it belongs to this session; tenants may use the same names for different sessions."""
        return (self.settings.tenant, self.settings.session) == (tenant, session)


@dataclass(eq=False)
class _Turn:
    """A turn, whose prompt is being computed, of a session with a wish to be retained."""

    tracked: TrackedRequest
    wish: Wish
    told_tokens: int = 0


class RequestHints:
    """Owned by the scheduler's thread. Nothing here waits, and the number of a request's actions is bounded."""

    def __init__(
        self,
        cache: CacheClient,
        groups: GroupTable,
        *,
        measures: Measures | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._measures = measures or Measures()
        self._clock = clock
        self._waiting: list[_Ended] = []
        self._turns: dict[str, _Turn] = {}
        self._names = KeptNames()
        self._answers: deque[tuple[str, str]] = deque(maxlen=MAX_ANSWERS)
        """Actions with their outcomes, as threads of the client hear them."""
        self._unknown: set[str] = set()
        self._says_again_s = float("-inf")

    @property
    def is_quiet(self) -> bool:
        """Whether a step has nothing to send."""
        return not (self._waiting or self._turns or self._names)

    @property
    def pending(self) -> int:
        """Number of prefixes that the server has yet to be told to keep or to release."""
        return len(self._waiting) + len(self._names)

    def read(self, envelope: object, settings: RequestSettings) -> tuple[Wish, ...]:
        """Returns a request's wishes, from its envelope and from the keys with the same meaning."""
        found = read_envelope(envelope)
        for name, why in found.ignored:
            self._count(name, why.value)
        if found.complaint and self._clock() >= self._says_again_s:
            self._says_again_s = self._clock() + SAY_EVERY_S
            logger.warning("%s (said once a minute at most)", found.complaint)
        wishes: list[Wish] = []
        if settings.pin_s:
            wishes.append(Wish(action=HintAction.RETAIN, ttl_s=settings.pin_s))
        if settings.session and settings.session_ttl_s:
            wishes.append(Wish(action=HintAction.RETAIN, session=settings.session, ttl_s=settings.session_ttl_s))
        # The envelope comes last, because later wishes override earlier ones.
        return (*wishes, *found.wishes)

    def arrive(self, tracked: TrackedRequest) -> None:
        """Sends the hints of a request that has arrived and take effect before it runs."""
        for wish in tracked.wishes:
            if wish.action in _AT_ONCE:
                tracked.chain.follow(tracked.request.block_hashes)
                self._send(self._describe(tracked, wish, tracked.chain.tokens), is_meant=not tracked.is_tainted)

    def admit(self, tracked: TrackedRequest) -> None:
        """Notes the turn of a request that was given blocks, if its session is retained."""
        for wish in tracked.wishes:
            if wish.action is HintAction.RETAIN and wish.session:
                self._turns[tracked.request.request_id] = _Turn(tracked, wish)

    def end(self, tracked: TrackedRequest, tokens: int) -> None:
        """Sends or queues the hints of a request that has ended. `tokens` is how many may have been saved; 0: none of
        its blocks are kept."""
        self._turns.pop(tracked.request.request_id, None)
        for wish in tracked.wishes:
            if wish.action is HintAction.RELEASE:
                tracked.chain.follow(tracked.request.block_hashes)
                settings = self._describe(tracked, wish, tracked.chain.tokens)
                if settings.session:
                    self._drop_waiting(settings)
                self._send(settings, is_meant=bool(settings.session) or not tracked.is_tainted)
            elif wish.action is HintAction.RETAIN:
                self._retain(self._describe(tracked, wish, tokens))

    def step(self, saves: Saves) -> None:
        """Sends the hints for prefixes that have been saved by now. Called before the step plans its saves, which
        include those of requests that ended before: so a prefix waits for the jobs under way when it is looked at for
        the second time."""
        if self._answers:
            self.count_answers()
        if self._turns:
            self._look_at_turns()
        if self._names:
            self._cache.start_hint(self._names.take())
        for one in list(self._waiting) if self._waiting else ():
            one.steps += 1
            if one.steps == 1:
                continue
            one.last_job = one.last_job or saves.last_job
            if 0 < saves.oldest_job <= one.last_job and one.steps < MAX_STEPS:
                continue
            self._waiting.remove(one)
            self._send(one.settings)

    def let_go(self) -> None:
        """Drops the hints of requests that have ended, because the weights change. Prefixes that the server retains
        wait for `settle`."""
        for one in self._waiting:
            self._count(_NAMES[one.settings.action], "skipped")
        self._waiting.clear()
        self._turns.clear()
        self._names.doubt()

    def settle(self, *, are_same: bool) -> None:
        """Notes whether blocks have their former names again. If not, later steps release the retained prefixes."""
        self._names.settle(are_same=are_same)

    def count_answers(self) -> None:
        """Counts the server's answers."""
        while self._answers:
            self._count(*self._answers.popleft())

    # ---- inside ----

    def _look_at_turns(self) -> None:
        """Retains sessions while their prompts are computed: in a small pool, new blocks may be evicted before the turn
        ends. The end of the turn replaces this."""
        for request_id, turn in list(self._turns.items()):
            tracked, request = turn.tracked, turn.tracked.request
            computed = request.num_computed_tokens
            is_over = computed >= request.num_prompt_tokens
            if not tracked.has_run or not (is_over or computed >= turn.told_tokens + PIECE_TOKENS):
                continue
            if not is_over and any(one.is_of(tracked.settings.tenant, turn.wish.session) for one in self._waiting):
                continue  # the piece before it goes first, or no piece of a long prompt would ever be sent
            turn.told_tokens = computed
            if is_over:
                del self._turns[request_id]
            if not tracked.is_tainted:
                tracked.chain.follow(request.block_hashes)
                tokens = min(computed, tracked.chain.tokens, tracked.progress.limit)
                self._retain(self._describe(tracked, turn.wish, tokens))

    def _describe(self, tracked: TrackedRequest, wish: Wish, tokens: int) -> HintSettings:
        limit = self._groups.align(tokens if wish.tokens is None else min(tokens, wish.tokens))
        if wish.action in _BY_NAME and wish.session:
            limit = 0
        return HintSettings(
            action=wish.action,
            chain=tracked.chain.data[: limit // self._groups.hash_block_size * HASH_BYTES],
            limit=limit,
            session=wish.session,
            ttl_s=wish.ttl_s,
            priority=wish.priority,
            tenant=tracked.settings.tenant,
        )

    def _retain(self, settings: HintSettings) -> None:
        if not settings.limit:
            self._count("retain", "skipped")
            return
        if settings.session:
            # If a session takes turns faster than they are saved, the latest one counts.
            self._drop_waiting(settings)
        if len(self._waiting) >= MAX_WAITING:
            self._count("retain", "too_many")
            return
        self._waiting.append(_Ended(settings))

    def _drop_waiting(self, settings: HintSettings) -> None:
        self._waiting = [one for one in self._waiting if not one.is_of(settings.tenant, settings.session)]

    def _send(self, settings: HintSettings, *, is_meant: bool = True) -> None:
        name = _NAMES[settings.action]
        if not is_meant or not (settings.chain or settings.session):
            self._count(name, "skipped")
            return
        if settings.action in _KEEPING:
            self._names.note(settings)
        self._cache.start_hint(settings, on_answer=partial(self._hear, name))

    def _hear(self, name: str, answer: Hinted | None) -> None:
        self._answers.append((name, "no_answer" if answer is None else answer.outcome.name.lower()))

    def _count(self, name: str, outcome: str) -> None:
        if name not in ACTION_TYPES and name not in self._unknown:
            if len(self._unknown) < MAX_NAMES and _is_plain(name):
                self._unknown.add(name)
            else:
                name = OTHER
        self._measures.count("kvoffload_hint_actions_total", action=name, outcome=outcome)


def is_kept(wishes: tuple[Wish, ...]) -> bool:
    """Whether a prefix with these wishes has to be saved as soon as possible."""
    return any(wish.action in _KEEPING for wish in wishes)


def _is_plain(name: str) -> bool:
    """Whether a name may become a label of a metric."""
    return bool(name) and name.isascii() and name.replace("_", "").replace("-", "").replace(".", "").isalnum()

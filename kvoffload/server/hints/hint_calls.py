"""Serves the hints of engines and operators, in all domains: checks who may give them, acts on them, and answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from kvoffload.cache import LocalCache
from kvoffload.protocol import (
    Call,
    Error,
    ErrorCode,
    Hint,
    HintAction,
    Hinted,
    HintOutcome,
    Promote,
    Promoted,
    PromotionOutcome,
    ServerMessage,
)
from kvoffload.protocol.hints import ListRetained, Retained, RetainedPrefix
from kvoffload.protocol.limits import NAME_BYTES
from kvoffload.server.common.refusal import refuse
from kvoffload.server.common.steps import Find, Steps
from kvoffload.server.hints.prefetches import UNUSED_S, Prefetched, Prefetches
from kvoffload.server.hints.prefix_blocks import Prefix
from kvoffload.server.hints.retentions import Caller, Held, Key, Retention, Retentions, Wish
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.drain import check_stranger
from kvoffload.server.sessions.session import Connection
from kvoffload.server.sessions.settings import CoreSettings
from kvoffload.server.sessions.tier_requests import TierRequests
from kvoffload.server.tiering.counts import cut_text
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.promotion_parts import AskedFor
from kvoffload.server.tiering.seen import Seen, look_for, serve_in_parts
from kvoffload.server.tiering.traffic import PREFETCH_WAIT_MS
from kvoffload.types import HASH_BYTES

DEFAULT_TTL_MS = 600_000
LOOK_S = 0.2
"""Seconds for which tiers are waited for that have to be asked what they have."""
EVERY_S = 0.1
"""Seconds between two checks for retentions and prefetches that are over."""
LISTED = 64
"""Number of retained prefixes in one answer. Of each, the first blocks of all groups are looked up."""
_SHOWN_DIGITS = 12

_Tell = Callable[[Hinted], None]


@dataclass(eq=False)
class DomainHints:
    """The state of one domain's hints."""

    done: Counter[str] = field(default_factory=Counter)
    """Number of hints, by action and outcome."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Number of tokens of the hints' prefixes, by what came of them."""

    def __post_init__(self) -> None:
        self.retentions = Retentions(self.tokens)
        self.prefetches = Prefetches(self.tokens)
        self.coming: dict[Key, Wish] = {}
        """Prefixes that were handed over to an engine and have not come up completely."""

    def forget_spaces(self, name_spaces: Set[int]) -> None:
        """Forgets all hints for these identities, whose blocks are about to go or have gone."""
        self.retentions.forget_spaces(name_spaces)
        self.prefetches.forget_spaces(name_spaces)
        self.coming = {key: wish for key, wish in self.coming.items() if key.name_space not in name_spaces}

    def note(self, action: HintAction, hinted: Hinted) -> Hinted:
        """Counts a hint's outcome, and returns it."""
        self.done[f"{action.name}.{hinted.outcome.name}".lower()] += 1
        return hinted


@dataclass(frozen=True)
class _Asked:
    """One hint, with its caller and its time."""

    hints: DomainHints
    cache: LocalCache
    domain: Domain
    caller: Caller
    message: Hint
    now_s: float

    def read_prefix(self) -> Prefix:
        return Prefix(self.domain.find_space(self.message.name_space), self.message.chain, self.message.limit)

    def look(self, prefix: Prefix) -> Steps[Seen]:
        """Returns the steps that find what memory and tiers have of a prefix."""
        if self.domain.traffic is None:
            return look_for(self.cache, prefix.space, prefix.rows, {})
        return self.domain.traffic.look_for(prefix.space, prefix.rows)

    @property
    def key(self) -> Key:
        """Key of the retention of the session that the hint names."""
        caller = self.caller
        return Key(caller.owner, caller.tenant, self.message.name_space, self.message.session)

    @property
    def wish(self) -> Wish:
        ttl_ms = self.message.ttl_ms or DEFAULT_TTL_MS
        return Wish(session=self.message.session, priority=self.message.priority, ends_s=self.now_s + ttl_ms / 1000)

    def tell_retained(self, outcome: HintOutcome, tokens: int, ends_s: float) -> Hinted:
        left_ms = max(round((ends_s - self.now_s) * 1000), 0) if tokens else 0
        return Hinted(outcome=outcome, tokens=tokens, ttl_ms=left_ms)


class HintCalls:
    """Belongs to the thread of the server's core."""

    def __init__(self, settings: CoreSettings, domains: Mapping[str, Domain], tiers: TierRequests) -> None:
        self._settings = settings
        self._domains = domains
        self._tiers = tiers
        self._now_s = self._due_s = 0.0
        self.by_domain = {name: DomainHints() for name in domains}

    def attach(self, domain: str, cache: LocalCache) -> None:
        """Connects a domain's memory. Adopted memory has no retentions."""
        self.by_domain[domain].retentions.attach(cache)

    def serve(self, connection: Connection, call: Call, now_ns: int) -> ServerMessage | Find | None:
        """Returns the answer, or a callable that finds it; None: it comes when the tiers have said what they have."""
        message = call.message
        hints = self.by_domain[connection.session.domain.name]
        if isinstance(message, ListRetained):
            return _list(hints.retentions, message, now_ns / 1e9)
        assert isinstance(message, Hint)
        asked = self._read(connection, message, now_ns / 1e9)
        if isinstance(asked, Error):
            return asked

        def tell(hinted: Hinted) -> None:
            self._tiers.answer(connection.key, call.number, hints.note(message.action, hinted))

        if message.action is HintAction.HAND_OVER:
            return self._hand_over(asked, tell)
        if message.action is HintAction.PREFETCH or (message.action is HintAction.RETAIN and message.chain):
            return self._look(asked, asked.read_prefix(), tell)
        return hints.note(message.action, _AT_ONCE[message.action](asked))

    def _read(self, connection: Connection, message: Hint, now_s: float) -> _Asked | Error:
        """Returns a hint with its caller, or a refusal."""
        domain = connection.session.domain
        caller = self._find_caller(connection, message)
        if isinstance(caller, Error):
            return caller
        if domain.cache is None or message.name_space not in domain.fingerprints:
            return refuse(message, ErrorCode.NOT_FOUND, f"there is no namespace {message.name_space}")
        if not (message.chain or message.session) or (message.action is HintAction.HAND_OVER and not message.session):
            line = "a hint names a session, or a chain of blocks; one to hand over names the session"
            return refuse(message, ErrorCode.MALFORMED, line)
        return _Asked(self.by_domain[domain.name], domain.cache, domain, caller, message, now_s)

    def _look(self, asked: _Asked, prefix: Prefix, tell: _Tell) -> ServerMessage | Find | None:
        """Looks for a prefix that a hint wants prefetched or retained."""
        if asked.message.action is HintAction.PREFETCH:
            return serve_in_parts(asked.look(prefix), partial(self._prefetch, asked, prefix, tell), looks=prefix.looks)
        holding = asked.hints.retentions.hold(prefix)
        return serve_in_parts(holding, partial(_retain, asked, prefix), looks=prefix.looks)

    def advance(self, now_ns: int) -> None:
        """Ends what is over, and lets go where room is lacking. The event loop calls it in every turn."""
        self._now_s = now_ns / 1e9
        if self._now_s < self._due_s:
            return
        self._due_s = self._now_s + EVERY_S
        for name, hints in self.by_domain.items():
            cache = self._domains[name].cache
            if cache is not None:
                hints.retentions.advance(self._now_s)
                hints.prefetches.advance(cache, self._now_s)

    def forget_spaces(self, domain: str, name_spaces: Set[int]) -> None:
        self.by_domain[domain].forget_spaces(name_spaces)

    def let_all_go(self) -> None:
        """Lets go of everything, as the server takes no new work and will end."""
        for hints in self.by_domain.values():
            hints.coming.clear()
            hints.retentions.let_all_go()

    def _find_caller(self, connection: Connection, message: Hint) -> Caller | Error:
        """Returns the caller of a hint, or a refusal. Engines may speak of their own blocks, for tenants that they may
        name; operators of all blocks."""
        session, registration = connection.session, connection.session.registration
        if registration is None or registration.name_space != message.name_space:
            refusal = check_stranger(self._settings, session, message)
            if refusal is None or registration is None:
                return refusal or Caller(session.owner)
            return refuse(message, ErrorCode.NOT_FOUND, f"namespace {message.name_space} is not the session's")
        tenants = list(registration.tenants.values())
        is_named = 0 < message.tenant <= len(tenants)
        tenant = tenants[message.tenant - 1] if is_named else registration.tenant
        name = next((name for name, number in registration.tenants.items() if number == tenant), "")
        return Caller(session.owner, tenant, name, session.engine or session.owner)

    def _hand_over(self, asked: _Asked, tell: _Tell) -> Find | None:
        found = _select_ones(asked)
        kept = found[0] if found else None
        wish = asked.wish
        if kept is not None:
            ends_s = wish.ends_s if asked.message.ttl_ms else kept.ends_s
            wish = replace(wish, priority=max(asked.message.priority, kept.priority), ends_s=ends_s)
        if found is None or not asked.message.chain:
            _take_over(kept, asked.caller, wish)
            tokens = 0 if kept is None else kept.blocks.tokens
            tell(asked.tell_retained(HintOutcome.DONE if kept else HintOutcome.NOTHING, tokens, wish.ends_s))
            return None
        prefix = asked.read_prefix()

        def find() -> Steps[tuple[Held, Seen]]:
            held = yield from holding
            seen = yield from asked.look(prefix)
            return held, seen

        holding = asked.hints.retentions.hold(prefix)
        conclude = partial(self._retain_or_prefetch, asked, prefix, wish=wish, kept=kept, tell=tell)
        return serve_in_parts(find(), conclude, looks=prefix.looks)

    def _retain_or_prefetch(
        self,
        asked: _Asked,
        prefix: Prefix,
        found: tuple[Held, Seen],
        *,
        wish: Wish,
        kept: Retention | None,
        tell: _Tell,
    ) -> None:
        """Retains a prefix that was handed over. What memory has not is prefetched first, and retained then."""
        hints, message, caller = asked.hints, asked.message, asked.caller
        held, seen = found
        outcome, tokens = hints.retentions.retain(caller, prefix, held, wish)
        if outcome not in (HintOutcome.PARTLY, HintOutcome.NOTHING):
            # A refusal changes nothing, and a success has already replaced the former retention.
            tell(asked.tell_retained(outcome, tokens, wish.ends_s))
            return
        hints.coming[asked.key] = wish

        def retain(held: Held) -> None:
            # It may have been released or handed over again in the meantime.
            if hints.coming.get(asked.key) is not wish:
                hints.retentions.give_back(held)
                return
            del hints.coming[asked.key]
            outcome, _tokens = hints.retentions.retain(caller, prefix, held, wish)
            if outcome in (HintOutcome.OVER_LIMIT, HintOutcome.NO_ROOM):
                hints.note(message.action, Hinted(outcome=outcome))

        def end(_: Promoted) -> None:
            if hints.coming.get(asked.key) is wish:
                find = serve_in_parts(hints.retentions.hold(prefix), retain, looks=prefix.looks)
                if find is not None:
                    self._tiers.find_later(message, find)

        def tell_both(hinted: Hinted) -> None:
            if hinted.outcome in (HintOutcome.DONE, HintOutcome.PARTLY):
                _take_over(kept, caller, wish)
            tell(asked.tell_retained(hinted.outcome, hinted.tokens, wish.ends_s))

        self._prefetch(asked, prefix, tell_both, seen, end)

    def _prefetch(
        self,
        asked: _Asked,
        prefix: Prefix,
        tell: _Tell,
        seen: Seen,
        end: Callable[[Promoted], None] = lambda _: None,
    ) -> None:
        """Asks the tiers which of the blocks that memory lacks they have, and has these brought up. `end` is called
        when that is over."""
        chain = asked.domain.traffic
        in_memory = prefix.find_reach(seen.in_memory)

        def conclude(found: Sequence[Found | None]) -> None:
            tell(self._bring(asked, prefix, seen, [tier for tier in found if tier is not None], end))

        if chain is None or in_memory >= prefix.most:
            tell(Hinted(outcome=_judge(prefix, in_memory), tokens=in_memory))
            end(_NOTHING_CAME)
            return
        chain.find_places(prefix.space, prefix.rows, seen, now_s=asked.now_s, wait_s=LOOK_S, then=conclude)

    def _bring(
        self,
        asked: _Asked,
        prefix: Prefix,
        seen: Seen,
        found: Sequence[Found],
        end: Callable[[Promoted], None],
    ) -> Hinted:
        """Makes the tiers bring up their blocks, as much as this payer may have. Returns the answer to the hint."""
        cache, chain, prefetches = asked.cache, asked.domain.traffic, asked.hints.prefetches
        assert chain is not None
        there = together = seen.in_memory
        lacking = [~known for known in there]
        for tier in found:
            together = [known | more for known, more in zip(together, tier, strict=True)]
        in_memory, reach = prefix.find_reach(there), prefix.find_reach(together)
        blocks = prefix.cut(reach, lacking)
        room_bytes = prefetches.find_room(cache, asked.caller.payer)
        is_cut = blocks.size_bytes > room_bytes
        if is_cut:
            limit = in_memory + (reach - in_memory) * room_bytes // blocks.size_bytes
            reach = prefix.find_reach(together, limit=limit)
            blocks = prefix.cut(reach, lacking)
        if reach <= in_memory or blocks.size_bytes > room_bytes:
            end(_NOTHING_CAME)
            return Hinted(outcome=HintOutcome.OVER_LIMIT if is_cut else _judge(prefix, in_memory), tokens=in_memory)
        now_s = max(self._now_s, asked.now_s)
        begun = Prefetched(
            payer=asked.caller.payer,
            blocks=blocks,
            tokens=reach - in_memory,
            since=cache.use_clock,
            ends_s=now_s + UNUSED_S,
        )
        prefetches.begin(begun)

        def over(promoted: Promoted) -> None:
            prefetches.note_over(begun, came=promoted.outcome in _CAME)
            end(promoted)

        message = Promote(name_space=prefix.space.number, chain=prefix.chain, limit=reach, wait_ms=PREFETCH_WAIT_MS)
        rows = prefix.space.chain_rows_of(prefix.chain, reach)
        end_s = now_s + PREFETCH_WAIT_MS / 1000
        chain.promote(AskedFor(message, prefix.space, rows, end_s, seen.cut(rows), asked.caller.owner), now_s, over)
        return Hinted(outcome=_judge(prefix, reach), tokens=reach)


_NOTHING_CAME = Promoted(outcome=PromotionOutcome.NOTHING, boundary=0)
_CAME = (PromotionOutcome.COMPLETE, PromotionOutcome.PARTLY)


def _judge(prefix: Prefix, tokens: int) -> HintOutcome:
    """Returns whether all, some or none of the prefix that the hint means is there."""
    if not tokens:
        return HintOutcome.NOTHING
    return HintOutcome.DONE if tokens >= prefix.most and not prefix.is_cut else HintOutcome.PARTLY


def _select(asked: _Asked) -> list[Retention]:
    """Returns the retentions that a hint speaks of: those of its session, or those that end within its chain."""
    message = asked.message
    found = asked.hints.retentions.select(asked.caller, message.name_space)
    if message.session:
        return [one for one in found if one.key.session == message.session]
    if not found:
        return []
    step = asked.domain.geometries[message.name_space].hash_block_size
    # One call for all names, which may be 131,072: a loop or a set of them would hold up the server.
    names = np.frombuffer(message.chain, np.dtype((np.void, HASH_BYTES)))[: message.limit // step].tolist()
    ends = {one.end for one in found}.intersection(names)
    return [one for one in found if one.end in ends]


def _select_ones(asked: _Asked) -> list[Retention] | None:
    """Does the same for one user and tenant. None: several have a session of that name, and the hint does not say whose
    is meant."""
    found = _select(asked)
    return None if len({one.key[:2] for one in found}) > 1 else found


def _take_over(kept: Retention | None, caller: Caller, wish: Wish) -> None:
    if kept is not None:
        kept.engine, kept.priority, kept.ends_s = caller.engine or kept.engine, wish.priority, wish.ends_s


def _retain(asked: _Asked, prefix: Prefix, held: Held) -> Hinted:
    outcome, tokens = asked.hints.retentions.retain(asked.caller, prefix, held, asked.wish)
    return asked.hints.note(HintAction.RETAIN, asked.tell_retained(outcome, tokens, asked.wish.ends_s))


def _renew_retained(asked: _Asked) -> Hinted:
    return _renew(asked, ends_s=asked.wish.ends_s)


def _prioritise(asked: _Asked) -> Hinted:
    return _renew(asked, ends_s=asked.wish.ends_s if asked.message.ttl_ms else None)


def _renew(asked: _Asked, *, ends_s: float | None) -> Hinted:
    """Gives the retentions that the hint speaks of another priority, and the end `ends_s` if there is one."""
    found = _select_ones(asked) or []
    for one in found:
        one.priority, one.ends_s = asked.message.priority, one.ends_s if ends_s is None else ends_s
    longest = max(found, key=lambda one: one.blocks.tokens, default=None)
    if longest is None:
        return Hinted(outcome=HintOutcome.NOTHING)
    return asked.tell_retained(HintOutcome.DONE, longest.blocks.tokens, longest.ends_s)


def _release(asked: _Asked) -> Hinted:
    found = _select(asked)
    message = asked.message
    were_coming = [
        key
        for key in asked.hints.coming
        if (key.name_space, key.session) == (message.name_space, message.session) and asked.caller.may_touch(key)
    ]
    for key in were_coming:
        del asked.hints.coming[key]
    asked.hints.retentions.let_go(found)
    tokens = max((one.blocks.tokens for one in found), default=0)
    return Hinted(outcome=HintOutcome.DONE if found or were_coming else HintOutcome.NOTHING, tokens=tokens)


_AT_ONCE: Mapping[HintAction, Callable[[_Asked], Hinted]] = {
    HintAction.RETAIN: _renew_retained,
    HintAction.RELEASE: _release,
    HintAction.PRIORITISE: _prioritise,
}


def _list(retentions: Retentions, message: ListRetained, now_s: float) -> Retained:
    """Lists the retained prefixes. The one that gives way first comes first."""
    every = list(retentions)
    return Retained(
        total=len(every),
        size_bytes=retentions.size_bytes,
        limit_bytes=retentions.limit_bytes,
        prefixes=tuple(_describe(retentions, every[message.first : message.first + LISTED], now_s)),
    )


def _describe(retentions: Retentions, rows: Sequence[Retention], now_s: float) -> Iterator[RetainedPrefix]:
    for one in rows:
        assert retentions.cache is not None
        yield RetainedPrefix(
            session=one.key.session,
            engine=one.engine,
            owner=cut_text(one.key.owner, NAME_BYTES),
            tenant=one.tenant_name,
            fingerprint=one.blocks.space.fingerprint.hex()[:_SHOWN_DIGITS],
            tokens=one.blocks.tokens,
            size_bytes=one.size_bytes,
            ttl_ms=max(round((one.ends_s - now_s) * 1000), 0),
            priority=one.priority,
            was_used=one.blocks.was_used(retentions.cache, since=one.since),
        )

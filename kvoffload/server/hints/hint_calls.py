"""What engines and operators ask for by hints, in all domains: who may, what is done, and what of it is told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from kvoffload.cache import LocalCache
from kvoffload.hash_rows import as_rows
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
from kvoffload.protocol.limits import ARRAY_ITEMS, NAME_BYTES
from kvoffload.server.drain import check_stranger
from kvoffload.server.hints.prefetches import UNUSED_S, Prefetched, Prefetches
from kvoffload.server.hints.prefix_blocks import Prefix
from kvoffload.server.hints.retentions import Caller, Key, Retention, Retentions, Wish
from kvoffload.server.operators.counts import cut_text
from kvoffload.server.refusal import refuse
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Connection
from kvoffload.server.terms import CoreTerms
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.requests import TierRequests
from kvoffload.server.tiering.terms import TierSpace
from kvoffload.server.tiering.traffic import PREFETCH_WAIT_MS

DEFAULT_TTL_MS = 600_000
LOOK_S = 0.2
"""For tiers that have to be asked what they have."""
EVERY_S = 0.1
"""Between two looks at what is over."""
_SHOWN_DIGITS = 12

_Tell = Callable[[Hinted], None]


@dataclass(eq=False)
class DomainHints:
    """What is so with one domain's hints."""

    done: Counter[str] = field(default_factory=Counter)
    """Hints, by action and outcome."""
    tokens: Counter[str] = field(default_factory=Counter)
    """Of their prefixes, by what came of them."""

    def __post_init__(self) -> None:
        self.retentions = Retentions(self.tokens)
        self.prefetches = Prefetches(self.tokens)
        self.coming: dict[Key, Wish] = {}
        """Handed over to an engine, and not all here yet."""

    def forget_spaces(self, name_spaces: Set[int]) -> None:
        """Blocks of these identities are to go, or have gone."""
        self.retentions.forget_spaces(name_spaces)
        self.prefetches.forget_spaces(name_spaces)
        self.coming = {key: wish for key, wish in self.coming.items() if key.name_space not in name_spaces}

    def note(self, action: HintAction, hinted: Hinted) -> Hinted:
        """Counts what was done."""
        self.done[f"{action.name}.{hinted.outcome.name}".lower()] += 1
        return hinted


@dataclass(frozen=True)
class _Asked:
    """One hint: of whom, and when."""

    hints: DomainHints
    cache: LocalCache
    domain: Domain
    caller: Caller
    message: Hint
    now_s: float

    def read_prefix(self) -> Prefix:
        number = self.message.name_space
        space = TierSpace(
            number=number, fingerprint=self.domain.fingerprints[number], geometry=self.domain.geometries[number]
        )
        return Prefix(space, self.message.chain, self.message.limit)

    @property
    def key(self) -> Key:
        """Of its session."""
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

    def __init__(self, terms: CoreTerms, domains: Mapping[str, Domain], tiers: TierRequests) -> None:
        self._terms = terms
        self._domains = domains
        self._tiers = tiers
        self._now_s = self._due_s = 0.0
        self.by_domain = {name: DomainHints() for name in domains}

    def attach(self, domain: str, cache: LocalCache) -> None:
        """The domain has its memory. Of adopted memory nothing is retained."""
        self.by_domain[domain].retentions.attach(cache)

    def serve(self, connection: Connection, call: Call, now_ns: int) -> ServerMessage | None:
        """Returns the answer; None: it comes when the tiers have said what they have."""
        message, domain = call.message, connection.session.domain
        hints = self.by_domain[domain.name]
        if isinstance(message, ListRetained):
            return _list(hints.retentions, message, now_ns / 1e9)
        assert isinstance(message, Hint)
        caller = self._find_caller(connection, message)
        if isinstance(caller, Error):
            return caller
        if domain.cache is None or message.name_space not in domain.fingerprints:
            return refuse(message, ErrorCode.NOT_FOUND, f"there is no namespace {message.name_space}")
        if not (message.chain or message.session) or (message.action is HintAction.HAND_OVER and not message.session):
            line = "a hint names a session, or a chain of blocks; one to hand over names the session"
            return refuse(message, ErrorCode.MALFORMED, line)
        asked = _Asked(hints, domain.cache, domain, caller, message, now_ns / 1e9)

        def tell(hinted: Hinted) -> None:
            self._tiers.answer(connection.key, call.number, hints.note(message.action, hinted))

        if message.action is HintAction.PREFETCH:
            self._prefetch(asked, asked.read_prefix(), tell)
        elif message.action is HintAction.HAND_OVER:
            self._hand_over(asked, tell)
        else:
            return hints.note(message.action, _AT_ONCE[message.action](asked))
        return None

    def advance(self, now_ns: int) -> None:
        """To be called in every turn of the loop: ends what is over, and lets go where room is lacking."""
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
        """The server takes nothing new, and is to end."""
        for hints in self.by_domain.values():
            hints.coming.clear()
            hints.retentions.let_all_go()

    def _find_caller(self, connection: Connection, message: Hint) -> Caller | Error:
        """Engines speak of their own blocks, for tenants that they may name; operators of all."""
        session, registration = connection.session, connection.session.registration
        if registration is None or registration.name_space != message.name_space:
            refusal = check_stranger(self._terms, session, message)
            if refusal is None or registration is None:
                return refusal or Caller(session.owner)
            return refuse(message, ErrorCode.NOT_FOUND, f"namespace {message.name_space} is not the session's")
        tenants = list(registration.tenants.values())
        is_named = 0 < message.tenant <= len(tenants)
        tenant = tenants[message.tenant - 1] if is_named else registration.tenant
        name = next((name for name, number in registration.tenants.items() if number == tenant), "")
        return Caller(session.owner, tenant, name, session.engine or session.owner)

    def _hand_over(self, asked: _Asked, tell: _Tell) -> None:
        hints, message, caller, wish = asked.hints, asked.message, asked.caller, asked.wish
        found = _select_ones(asked)
        held = found[0] if found else None
        if held is not None:
            ends_s = wish.ends_s if message.ttl_ms else held.ends_s
            wish = replace(wish, priority=max(message.priority, held.priority), ends_s=ends_s)

        def take_over() -> None:
            if held is not None:
                held.engine, held.priority, held.ends_s = caller.engine or held.engine, wish.priority, wish.ends_s

        if found is None or not message.chain:
            take_over()
            tokens = 0 if held is None else held.blocks.tokens
            tell(asked.tell_retained(HintOutcome.DONE if held else HintOutcome.NOTHING, tokens, wish.ends_s))
            return
        prefix = asked.read_prefix()
        outcome, tokens = hints.retentions.retain(caller, prefix, wish)
        if outcome not in (HintOutcome.PARTLY, HintOutcome.NOTHING):
            # What is refused changes nothing; and what is done has replaced it.
            tell(asked.tell_retained(outcome, tokens, wish.ends_s))
            return
        hints.coming[asked.key] = wish

        def end(_: Promoted) -> None:
            # It may have been released meanwhile, or handed over once more.
            if hints.coming.get(asked.key) is wish:
                del hints.coming[asked.key]
                outcome, _tokens = hints.retentions.retain(caller, prefix, wish)
                if outcome in (HintOutcome.OVER_LIMIT, HintOutcome.NO_ROOM):
                    hints.note(message.action, Hinted(outcome=outcome))

        def tell_both(hinted: Hinted) -> None:
            if hinted.outcome in (HintOutcome.DONE, HintOutcome.PARTLY):
                take_over()
            tell(asked.tell_retained(hinted.outcome, hinted.tokens, wish.ends_s))

        self._prefetch(asked, prefix, tell_both, end)

    def _prefetch(
        self, asked: _Asked, prefix: Prefix, tell: _Tell, end: Callable[[Promoted], None] = lambda _: None
    ) -> None:
        """Asks the tiers what they have of what memory lacks, and has it brought up. `end` hears when it is over."""
        cache, chain = asked.cache, asked.domain.traffic
        there = prefix.look_up(cache)
        in_memory = prefix.find_reach(there)

        def conclude(found: Sequence[Found | None]) -> None:
            there = prefix.look_up(cache)
            tell(self._bring(asked, prefix, there, [tier for tier in found if tier is not None], end))

        if chain is None or in_memory >= prefix.most:
            tell(Hinted(outcome=_judge(prefix, in_memory), tokens=in_memory))
            end(_NOTHING_CAME)
            return
        lacking = [~known for known in there]
        chain.find_places(prefix.space.number, prefix.rows, lacking, now_s=asked.now_s, wait_s=LOOK_S, then=conclude)

    def _bring(
        self,
        asked: _Asked,
        prefix: Prefix,
        there: Found,
        found: Sequence[Found],
        end: Callable[[Promoted], None],
    ) -> Hinted:
        """Has brought up what the tiers have, as much as may come for somebody. What was begun."""
        cache, chain, prefetches = asked.cache, asked.domain.traffic, asked.hints.prefetches
        assert chain is not None
        lacking, together = [~known for known in there], there
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
        chain.promote(message, now_s, over)
        return Hinted(outcome=_judge(prefix, reach), tokens=reach)


_NOTHING_CAME = Promoted(outcome=PromotionOutcome.NOTHING, boundary=0)
_CAME = (PromotionOutcome.COMPLETE, PromotionOutcome.PARTLY)


def _judge(prefix: Prefix, tokens: int) -> HintOutcome:
    """Of all that was meant, whether it is there."""
    if not tokens:
        return HintOutcome.NOTHING
    return HintOutcome.DONE if tokens >= prefix.most else HintOutcome.PARTLY


def _select(asked: _Asked) -> list[Retention]:
    """Whose a hint speaks of: a session's, or those that end within its chain."""
    message = asked.message
    ends: set[bytes] = set()
    if not message.session:
        step = asked.domain.geometries[message.name_space].hash_block_size
        ends = {row.tobytes() for row in as_rows(message.chain)[: message.limit // step]}
    return asked.hints.retentions.select(asked.caller, message.name_space, message.session, ends)


def _select_ones(asked: _Asked) -> list[Retention] | None:
    """Says the same of one user and tenant; None: there are several of that name, and it is not said whose is meant."""
    found = _select(asked)
    return None if len({one.key[:2] for one in found}) > 1 else found


def _retain(asked: _Asked) -> Hinted:
    if not asked.message.chain:
        return _renew(asked, ends_s=asked.wish.ends_s)
    outcome, tokens = asked.hints.retentions.retain(asked.caller, asked.read_prefix(), asked.wish)
    return asked.tell_retained(outcome, tokens, asked.wish.ends_s)


def _prioritise(asked: _Asked) -> Hinted:
    return _renew(asked, ends_s=asked.wish.ends_s if asked.message.ttl_ms else None)


def _renew(asked: _Asked, *, ends_s: float | None) -> Hinted:
    """Those that are there go on, with another priority; and until then, if that is said."""
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
    HintAction.RETAIN: _retain,
    HintAction.RELEASE: _release,
    HintAction.PRIORITISE: _prioritise,
}


def _list(retentions: Retentions, message: ListRetained, now_s: float) -> Retained:
    """What is retained, with what gives way first coming first."""
    every = list(retentions)
    return Retained(
        total=len(every),
        size_bytes=retentions.size_bytes,
        limit_bytes=retentions.limit_bytes,
        prefixes=tuple(_describe(retentions, every[message.first : message.first + ARRAY_ITEMS], now_s)),
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

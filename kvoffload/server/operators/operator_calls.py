"""Serves requests of operators and engines about the server itself: counts, explanations, and the few things that may
be changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from heapq import nlargest
from typing import Any, TypeAlias

import numpy as np

from kvoffload.cache import LocalCache
from kvoffload.protocol import (
    Clear,
    ClearedBlocks,
    ClientMessage,
    Done,
    Error,
    ErrorCode,
    Explain,
    Explained,
    Insight,
    Inspect,
    ListAgentSessions,
    MemorySize,
    ModelUse,
    NamedCount,
    ServerMessage,
    SetQuota,
    Stats,
    Timing,
)
from kvoffload.protocol.insight import TAG_BYTES
from kvoffload.protocol.limits import MAX_MODELS, NAME_BYTES
from kvoffload.protocol.opening import find_model
from kvoffload.server.channels.express_channels import ExpressChannels
from kvoffload.server.common.refusal import refuse
from kvoffload.server.common.steps import Find, FoundLater, Steps, run_steps, take_parts
from kvoffload.server.hints.hint_calls import DomainHints
from kvoffload.server.operators import hit_window
from kvoffload.server.operators.hit_window import HitWindow
from kvoffload.server.operators.ledger import LOOK_NS
from kvoffload.server.operators.prompt_ledger import FoundPrompts, OnPrompt, PromptLedger, find_prompts
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Connection, EngineSession
from kvoffload.server.tiering.counts import cut_text, describe_counts
from kvoffload.types import ReuseRule

logger = logging.getLogger(__name__)

AT_ONCE_TAGS = 4096
"""Number of tags of one message that are counted on the core's thread. More go to the thread for long calls."""
AT_ONCE_GROUPS = 256
"""Number of groups, of all prompts of one message, whose bytes are counted on the core's thread."""

_Answer: TypeAlias = ServerMessage | Find


class OperatorCalls:
    """Belongs to the thread of the server's core."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        *,
        tell_cleared: Callable[[str, Set[int]], None],
        hints: Mapping[str, DomainHints],
        is_operator: Callable[[EngineSession], bool],
        express: ExpressChannels | None = None,
        on_prompt: OnPrompt | None = None,
    ) -> None:
        """`tell_cleared` is called with the namespaces of a domain whose blocks are about to be forgotten, and
        `on_prompt` with all that engines ask for. `hints` has what hints have done, by domain. `is_operator` says
        whether a session is an operator's by its user or key."""
        self._is_operator = is_operator
        self._tell_cleared = tell_cleared
        self._hints = hints
        self._express = express
        self._ledgers = {name: PromptLedger(domain, on_prompt) for name, domain in domains.items()}
        self._errors: dict[str, Counter[int]] = {name: Counter() for name in (*domains, "")}
        """Errors by domain. Those for processes that belong to no domain, as far as is known, are under ""."""
        self._now_ns = 0
        self._next_look_ns = 0
        self._next_window_ns = 0
        self.handlers: Mapping[type[ClientMessage], Callable[[Connection, ClientMessage], _Answer]] = {
            **dict.fromkeys((Stats, Explain, Inspect, Clear, SetQuota), self._serve),
            ListAgentSessions: self._list_agents,
        }

    def note_answer(self, answer: object, session: EngineSession | None = None) -> None:
        """Counts an answer if it is an error, for the domain of the session that gets it, if there is one."""
        if isinstance(answer, Error):
            self._errors["" if session is None else session.domain.name][answer.code] += 1

    def look(self, now_ns: int) -> None:
        """Notes what is occupied, for the ledgers, and what was hit, if it is time. To be called in every turn of the
        loop."""
        self._now_ns = now_ns
        if now_ns >= self._next_look_ns:
            self._next_look_ns = now_ns + LOOK_NS
            for one in self._ledgers.values():
                one.ledger.look(now_ns)
        if now_ns >= self._next_window_ns:
            looked = [one.look(now_ns) for one in self._ledgers.values()]
            self._next_window_ns = now_ns + (hit_window.LOOK_NS if all(looked) else LOOK_NS)

    def note_moved(self, domain: str, fingerprint: bytes, *, read_bytes: int = 0, written_bytes: int = 0) -> None:
        """Counts blocks of an identity that a slower tier has brought up, or has taken."""
        self._ledgers[domain].ledger.note_moved(fingerprint, read_bytes=read_bytes, written_bytes=written_bytes)

    def _serve(self, connection: Connection, message: ClientMessage) -> _Answer:
        domain = connection.session.domain
        if domain.cache is None:
            return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
        match message:
            case Stats():
                return describe_counts(domain.cache.stats, domain.traffic)
            case Explain():
                return self._explain(domain.cache, connection, message)
            case Inspect():
                # Times of calls are counted for all domains together.
                is_told = len(self._ledgers) == 1 or self._is_operator(connection.session)
                return self._inspect(domain, tells_all=is_told)
            case Clear() | SetQuota():
                return self._change(domain, domain.cache, message)
        return refuse(message, ErrorCode.UNKNOWN_OPERATION, "is not served here")

    def _list_agents(self, connection: Connection, message: ClientMessage) -> _Answer:
        assert isinstance(message, ListAgentSessions)
        return self._ledgers[connection.session.domain.name].ledger.list_sessions(message.first)

    def _explain(self, cache: LocalCache, connection: Connection, message: Explain) -> _Answer:
        """Another thread looks up which blocks left the memory and when, as it may have to wait for threads that
        write. It also counts different blocks if there are many."""
        session, registration, queries = connection.session, connection.registration, message.queries
        ledger = self._ledgers[session.domain.name]
        ledger.ledger.take_saved(registration, message.saved_bytes)
        asks = [ledger.asks_memory(registration, query) for query in queries]

        def conclude(found: FoundPrompts) -> ServerMessage:
            return Explained(answers=tuple(ledger.take(registration, queries, found, owner=session.owner)))

        def look() -> Steps[FoundLater]:
            found = yield from steps
            return partial(conclude, found)

        geometry = session.domain.geometries.get(registration.name_space)
        steps = find_prompts(cache, registration.name_space, geometry, queries, asks)
        has_many_groups = geometry is not None and len(queries) * len(geometry.groups) > AT_ONCE_GROUPS
        has_many_tags = sum(len(query.tags) for query in queries) > AT_ONCE_TAGS * TAG_BYTES
        is_long = any(asks) or has_many_groups or has_many_tags
        return take_parts(look()) if is_long else conclude(run_steps(steps))

    def _change(self, domain: Domain, cache: LocalCache, message: Clear | SetQuota) -> _Answer:
        return self._clear(domain, cache) if isinstance(message, Clear) else self._set_quota(domain, message)

    def _clear(self, domain: Domain, cache: LocalCache) -> _Answer:
        """Clears a domain's memory. Subscribers are told first, and hear of blocks that are stored meanwhile later.
        Prefixes that are retained meanwhile are let go at the end."""
        name_spaces, hints = list(domain.fingerprints), self._hints[domain.name]
        self._tell_cleared(domain.name, set(name_spaces))

        def conclude(blocks: int) -> ServerMessage:
            hints.forget_spaces(set(name_spaces))
            return ClearedBlocks(blocks=blocks)

        def clear() -> FoundLater:
            blocks = sum(_clear_one(cache, name_space) for name_space in name_spaces)
            logger.warning("an operator cleared the memory of domain %r: %d blocks", domain.name, blocks)
            return partial(conclude, blocks)

        return clear

    def _set_quota(self, domain: Domain, message: SetQuota) -> ServerMessage:
        assert domain.cache is not None
        known = {tenant.name: tenant.quota_bytes for tenant in domain.cache.stats.tenants}
        if not known.get(message.tenant) or not message.quota_bytes:
            line = f"tenant {message.tenant!r} has no quota" if message.quota_bytes else "a quota is 1 byte or more"
            return refuse(message, ErrorCode.NOT_FOUND, line)
        domain.cache.open_tenant(message.tenant, quota_bytes=message.quota_bytes)
        logger.warning("an operator set the quota of tenant %r to %d bytes", message.tenant, message.quota_bytes)
        return Done()

    def _inspect(self, domain: Domain, *, tells_all: bool) -> Insight:
        ledger = self._ledgers[domain.name]
        counts, hints = ledger.counts, self._hints[domain.name]
        ledger.look(self._now_ns)
        largest = _find_largest(domain)
        return Insight(
            outcomes=_name(ledger.tokens),
            errors=_name(self._count_errors([*self._errors] if tells_all else [domain.name])),
            timings=tuple(self._describe_times(domain, tells_calls=tells_all)),
            asked_blocks=counts.asked_blocks,
            distinct_blocks=counts.distinct_blocks,
            saved_us=counts.saved_us,
            models=tuple(_describe_model(domain, *one) for one in largest),
            speeds=tuple(_describe_speeds(domain)),
            hints=_name(hints.done),
            hint_tokens=_name(hints.tokens),
            retained=len(hints.retentions),
            retained_bytes=hints.retentions.size_bytes,
            retained_limit_bytes=hints.retentions.limit_bytes,
            ledger=ledger.ledger.rows,
            memory_kib_s=ledger.ledger.memory_kib_s,
            tier_kib_s=ledger.ledger.tier_kib_s,
            **_describe_curve(domain),
            **_describe_window(ledger.window),
            window_has_other_groups=any(_has_other_groups(domain, number) for _, number, _ in largest),
        )

    def _count_errors(self, domains: Iterable[str]) -> dict[str, int]:
        counts: Counter[int] = Counter()
        for name in domains:
            counts += self._errors[name]
            counts += Counter({} if self._express is None else self._express.refusals(name))
        return {ErrorCode(code).name.lower(): count for code, count in counts.items()}

    def _describe_times(self, domain: Domain, *, tells_calls: bool) -> Iterator[Timing]:
        assert domain.cache is not None
        calls = {} if self._express is None or not tells_calls else self._express.call_times()
        for call, (buckets, sum_ns) in calls.items():
            yield _time("call", call, buckets, sum_ns)
        residence = domain.cache.stats.residence
        yield _time("residence", "", residence.counts, residence.sum_s * 1_000_000_000)
        for tier in () if domain.traffic is None else domain.traffic.tiers:
            waits = tier.reads.waits
            yield _time("promotion", tier.settings.name, waits.counts, int(waits.sum_s * 1e9))


def _clear_one(cache: LocalCache, name_space: int) -> int:
    try:
        return cache.clear(name_space)
    except ValueError:
        # The namespace was forgotten meanwhile, and had no blocks.
        return 0


def _find_largest(domain: Domain) -> list[tuple[bytes, int, int]]:
    """Returns the identities that use the most memory, at most MAX_MODELS: fingerprint, namespace and bytes."""
    assert domain.cache is not None
    used_by = domain.cache.used_by_each()
    largest = nlargest(MAX_MODELS, domain.fingerprints.items(), key=lambda one: used_by.get(one[0], 0))
    return [(fingerprint, number, used_by.get(number, 0)) for number, fingerprint in largest]


def _has_other_groups(domain: Domain, name_space: int) -> bool:
    geometry = domain.geometries.get(name_space)
    return geometry is not None and any(group.rule.reuse is not ReuseRule.PREFIX for group in geometry.groups)


def _describe_model(domain: Domain, fingerprint: bytes, _name_space: int, used_bytes: int) -> ModelUse:
    register = domain.registers.get(fingerprint)
    name = find_model(() if register is None else register.identity)
    return ModelUse(name=cut_text(name, NAME_BYTES), fingerprint=fingerprint.hex()[:12], used_bytes=used_bytes)


def _describe_speeds(domain: Domain) -> Iterator[NamedCount]:
    for tier in () if domain.traffic is None else domain.traffic.tiers:
        if tier.reads.rate.is_measured:
            yield NamedCount(name=tier.settings.name, count=int(tier.reads.rate.bytes_per_s))


def _describe_curve(domain: Domain) -> dict[str, Any]:
    assert domain.cache is not None
    curve = domain.cache.memory_curve
    sizes = (
        MemorySize(quarters=round(4 * one.memory), hit_blocks=one.hit_blocks, hit_bytes=one.hit_bytes)
        for one in curve.points
    )
    return {
        "curve_blocks": curve.asked_blocks,
        "curve_bytes": curve.asked_bytes,
        "curve_one_in": curve.one_in,
        "curve": tuple(sizes),
    }


def _describe_window(window: HitWindow) -> dict[str, Any]:
    sums = window.sums
    return {
        "window_s": window.span_s,
        "window_saved_us": sums.saved_us,
        "window_hit_memory": sums.hit_memory,
        "window_hit_lower": sums.hit_lower,
        "window_evicted": sums.evicted,
        "window_blocks": sums.asked_blocks,
        "window_hits": tuple(max(hits, 0) for hits in sums.hit_blocks),
    }


def _name(counts: Mapping[str, int]) -> tuple[NamedCount, ...]:
    return tuple(NamedCount(name=name, count=count) for name, count in sorted(counts.items()))


def _time(name: str, label: str, counts: Sequence[int], sum_ns: int) -> Timing:
    return Timing(name=name, label=label, counts=np.array(counts, "<u8").tobytes(), sum_ns=sum_ns)

"""What operators and engines ask of the server itself: counts, explanations, and the few things that may be changed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    Query,
    ServerMessage,
    SetQuota,
    Stats,
    Timing,
)
from kvoffload.protocol.limits import MAX_MODELS, NAME_BYTES
from kvoffload.server.channels.express_channels import ExpressChannels
from kvoffload.server.hints.hint_calls import DomainHints
from kvoffload.server.operators.counts import cut_text, describe_counts
from kvoffload.server.operators.prompt_ledger import NOT_ASKED, FoundBlock, OnPrompt, PromptLedger, find_block
from kvoffload.server.outbox import FoundLater
from kvoffload.server.refusal import refuse
from kvoffload.server.sessions.domain import Domain
from kvoffload.server.sessions.session import Connection

logger = logging.getLogger(__name__)


_Answer: TypeAlias = ServerMessage | Callable[[], FoundLater]


class OperatorCalls:
    """Belongs to the thread of the server's core."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        *,
        tell_cleared: Callable[[str, int], None],
        hints: Mapping[str, DomainHints],
        express: ExpressChannels | None = None,
        on_prompt: OnPrompt | None = None,
    ) -> None:
        """`tell_cleared` hears of each namespace of a domain whose blocks are about to be forgotten, `on_prompt` of all
        that engines ask for. `hints` has what hints have done, by domain."""
        self._tell_cleared = tell_cleared
        self._hints = hints
        self._express = express
        self._ledgers = {name: PromptLedger(domain, on_prompt) for name, domain in domains.items()}
        self._errors: Counter[ErrorCode] = Counter()
        self.handlers: Mapping[type[ClientMessage], Callable[[Connection, ClientMessage], _Answer]] = {
            **dict.fromkeys((Stats, Explain, Inspect, Clear, SetQuota), self._serve),
            ListAgentSessions: self._list_agents,
        }

    def note_answer(self, answer: object) -> None:
        """Counts those that are errors."""
        if isinstance(answer, Error):
            self._errors[answer.code] += 1

    def _serve(self, connection: Connection, message: ClientMessage) -> _Answer:
        domain = connection.session.domain
        if domain.cache is None:
            return refuse(message, ErrorCode.BUSY, "the memory is not there yet")
        match message:
            case Stats():
                return describe_counts(domain.cache.stats, domain.traffic)
            case Explain():
                return self._explain(domain.cache, connection, message.queries)
            case Inspect():
                return self._inspect(domain)
            case Clear() | SetQuota():
                return self._change(domain, domain.cache, message)
        return refuse(message, ErrorCode.UNKNOWN_OPERATION, "is not served here")

    def _list_agents(self, connection: Connection, message: ClientMessage) -> _Answer:
        assert isinstance(message, ListAgentSessions)
        return self._ledgers[connection.session.domain.name].agents.list_from(message.first)

    def _explain(self, cache: LocalCache, connection: Connection, queries: Sequence[Query]) -> _Answer:
        """What left the memory, and when, is looked for on another thread, as those that write may be waited for."""
        session, registration = connection.session, connection.registration
        ledger = self._ledgers[session.domain.name]
        is_asked = [ledger.asks_memory(registration, query) for query in queries]

        def conclude(found: Sequence[FoundBlock]) -> ServerMessage:
            taken = (ledger.take(registration, *one, owner=session.owner) for one in zip(queries, found, strict=True))
            return Explained(answers=tuple(taken))

        def look() -> FoundLater:
            found = [
                find_block(cache, registration.name_space, query) if asks else NOT_ASKED
                for query, asks in zip(queries, is_asked, strict=True)
            ]
            return partial(conclude, found)

        return look if any(is_asked) else conclude([NOT_ASKED] * len(queries))

    def _change(self, domain: Domain, cache: LocalCache, message: Clear | SetQuota) -> _Answer:
        return self._clear(domain, cache) if isinstance(message, Clear) else self._set_quota(domain, message)

    def _clear(self, domain: Domain, cache: LocalCache) -> _Answer:
        """Subscribers are told first: what is stored meanwhile they hear of later. What was retained meanwhile is
        let go at the end."""
        name_spaces, hints = list(domain.fingerprints), self._hints[domain.name]
        for name_space in name_spaces:
            self._tell_cleared(domain.name, name_space)

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

    def _inspect(self, domain: Domain) -> Insight:
        ledger = self._ledgers[domain.name]
        counts, hints = ledger.counts, self._hints[domain.name]
        return Insight(
            outcomes=_name(ledger.tokens),
            errors=_name(self._count_errors()),
            timings=tuple(self._describe_times(domain)),
            asked_blocks=counts.asked_blocks,
            distinct_blocks=counts.distinct_blocks,
            saved_us=counts.saved_us,
            models=_describe_models(domain),
            speeds=tuple(_describe_speeds(domain)),
            hints=_name(hints.done),
            hint_tokens=_name(hints.tokens),
            retained=len(hints.retentions),
            retained_bytes=hints.retentions.size_bytes,
            retained_limit_bytes=hints.retentions.limit_bytes,
            **_describe_curve(domain),
        )

    def _count_errors(self) -> dict[str, int]:
        refused = {} if self._express is None else self._express.refusals()
        counts = self._errors + Counter({ErrorCode(code): count for code, count in refused.items()})
        return {code.name.lower(): count for code, count in counts.items()}

    def _describe_times(self, domain: Domain) -> Iterator[Timing]:
        assert domain.cache is not None
        for call, (buckets, sum_ns) in ({} if self._express is None else self._express.call_times()).items():
            yield _time("call", call, buckets, sum_ns)
        residence = domain.cache.stats.residence
        yield _time("residence", "", residence.counts, residence.sum_s * 1_000_000_000)
        for tier in () if domain.traffic is None else domain.traffic.tiers:
            waits = tier.reads.waits
            yield _time("promotion", tier.terms.name, waits.counts, int(waits.sum_s * 1e9))


def _clear_one(cache: LocalCache, name_space: int) -> int:
    try:
        return cache.clear(name_space)
    except ValueError:
        # It was forgotten meanwhile, and had no blocks.
        return 0


def _describe_models(domain: Domain) -> tuple[ModelUse, ...]:
    """Those that use most."""
    assert domain.cache is not None
    used_by = domain.cache.stats.used_by
    rows = []
    for name_space, fingerprint in domain.fingerprints.items():
        register = domain.registers.get(fingerprint)
        named = () if register is None else register.identity
        name = next((part.value for part in named if part.name == "model"), "")
        used_bytes = used_by.get(name_space, 0)
        rows.append(
            ModelUse(name=cut_text(name, NAME_BYTES), fingerprint=fingerprint.hex()[:12], used_bytes=used_bytes)
        )
    rows.sort(key=lambda row: row.used_bytes, reverse=True)
    return tuple(rows[:MAX_MODELS])


def _describe_speeds(domain: Domain) -> Iterator[NamedCount]:
    for tier in () if domain.traffic is None else domain.traffic.tiers:
        if tier.reads.rate.is_measured:
            yield NamedCount(name=tier.terms.name, count=int(tier.reads.rate.bytes_per_s))


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


def _name(counts: Mapping[str, int]) -> tuple[NamedCount, ...]:
    return tuple(NamedCount(name=name, count=count) for name, count in sorted(counts.items()))


def _time(name: str, label: str, counts: Sequence[int], sum_ns: int) -> Timing:
    return Timing(name=name, label=label, counts=np.array(counts, "<u8").tobytes(), sum_ns=sum_ns)

"""A server's counts, by the names of the catalogue. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvoffload.cache import CacheStats
from kvoffload.client.insight import ServerInsight
from kvoffload.client.inspector import EngineSurvey
from kvoffload.metrics.exposition import Reading, distribution, reading
from kvoffload.metrics.labels import SMALLER
from kvoffload.protocol import LedgerKind
from kvoffload.top.memory_worth import MemoryWorth
from kvoffload.units import KIB

MEMORY = "memory"
_GAUGES = {
    "index_bytes": "kvoffload_index_bytes",
    "leases": "kvoffload_open_leases",
    "namespaces": "kvoffload_namespaces",
    "ready_bytes": "kvoffload_memory_ready_bytes",
    "quarantined": "kvoffload_quarantined_blocks",
    "reserved": "kvoffload_reserved_slots",
    "sessions": "kvoffload_sessions",
    "duplicates": "kvoffload_duplicate_blocks_total",
    "evicted": "kvoffload_evicted_blocks_total",
    "evicted_unused": "kvoffload_evicted_unused_blocks_total",
    "lost_touches": "kvoffload_lost_touches_total",
    "mismatches": "kvoffload_mismatches_total",
    "moved_bytes": "kvoffload_compacted_bytes_total",
    "given_back_bytes": "kvoffload_memory_given_back_bytes_total",
}
_TRAFFIC = {
    "missing": "kvoffload_tier_missing_blocks_total",
    "promoted": "kvoffload_tier_promoted_blocks_total",
    "promoted_bytes": "kvoffload_tier_promoted_bytes_total",
    "quarantined": "kvoffload_tier_quarantined_records_total",
    "waiting_bytes": "kvoffload_tier_waiting_bytes",
    "waiting_requests": "kvoffload_tier_waiting_requests",
    "written": "kvoffload_tier_written_blocks_total",
    "written_bytes": "kvoffload_tier_written_bytes_total",
}
_TIMINGS = {
    "call": ("kvoffload_call_seconds", "call"),
    "promotion": ("kvoffload_promotion_seconds", "tier"),
    "residence": ("kvoffload_residence_seconds", ""),
}
_DROPPED = {"dropped_full": "full", "dropped_gone": "gone", "failed": "failed"}
_UNSERVED = {"late": "late", "too_slow": "too_slow", "without_room": "without_room"}


def read_stats(stats: CacheStats | None) -> Iterator[Reading]:
    """Reads a server's counts. None: it does not answer."""
    yield reading("kvoffload_server_up", float(stats is not None))
    if stats is None:
        return
    for field, name in _GAUGES.items():
        yield reading(name, getattr(stats, field))
    for outcome, count in (("hit", stats.hits), ("miss", stats.misses), ("refused", stats.refused)):
        yield reading("kvoffload_acquires_total", count, outcome=outcome)
    for reason in SMALLER:
        yield reading("kvoffload_memory_smaller", float(reason == stats.memory_reason), reason=reason)
    yield from _read_places(stats)
    for tenant in stats.tenants:
        yield reading("kvoffload_tenant_used_bytes", tenant.used_bytes, tenant=tenant.name)
        yield reading("kvoffload_tenant_quota_bytes", tenant.quota_bytes, tenant=tenant.name)
    for tier, counts in stats.traffic.items():
        yield from _read_traffic(tier, counts)


def read_insight(insight: ServerInsight) -> Iterator[Reading]:
    """Reads how prompts ended, and how long each kind of work took."""
    for outcome, count in insight.outcomes.items():
        yield reading("kvoffload_prompt_tokens_total", count, outcome=outcome)
    for code, count in insight.errors.items():
        yield reading("kvoffload_answered_errors_total", count, code=code)
    yield reading("kvoffload_asked_blocks_total", insight.asked_blocks)
    yield reading("kvoffload_distinct_blocks", insight.distinct_blocks)
    yield reading("kvoffload_engines_saved_seconds_total", insight.saved_s)
    if insight.told_ceiling is not None:
        yield reading("kvoffload_hit_ceiling_ratio", insight.told_ceiling)
    for memory, share in insight.curve.hit_rates.items():
        yield reading("kvoffload_memory_hit_ratio", share, memory=f"{memory:g}")
    for hint, count in insight.hints.items():
        action, _, outcome = hint.partition(".")
        yield reading("kvoffload_hint_requests_total", count, action=action, outcome=outcome)
    for outcome, count in insight.hint_tokens.items():
        yield reading("kvoffload_hint_tokens_total", count, outcome=outcome)
    yield reading("kvoffload_hint_retained_prefixes", insight.retained)
    yield reading("kvoffload_hint_retained_bytes", insight.retained_bytes)
    yield reading("kvoffload_hint_retained_limit_bytes", insight.retained_limit_bytes)
    yield from _read_ledger(insight)
    for timing in insight.timings:
        if timing.name in _TIMINGS:
            name, label = _TIMINGS[timing.name]
            yield distribution(name, timing.counts, timing.sum_s, **({label: timing.label} if label else {}))


def _read_ledger(insight: ServerInsight) -> Iterator[Reading]:
    """Reads the ledger's rows of tenants and models. The rest of each has a label of its own."""
    for tier, byte_s in insight.occupied_byte_s.items():
        yield reading("kvoffload_occupied_byte_seconds_total", byte_s, tier=tier)
    for row in insight.ledger:
        who = {"by": f"other_{row.kind.label}s" if row.is_rest else row.kind.label, "account": row.name}
        yield reading("kvoffload_ledger_asked_tokens_total", row.asked, **who)
        yield reading("kvoffload_ledger_hit_tokens_total", row.promised, **who)
        yield reading("kvoffload_ledger_memory_byte_seconds_total", row.memory_kib_s * KIB, **who)
        yield reading("kvoffload_ledger_read_bytes_total", row.read_bytes, **who)
        yield reading("kvoffload_ledger_saved_seconds_total", row.saved_us / 1e6, **who)
        yield reading("kvoffload_ledger_written_bytes_total", row.written_bytes, **who)
        if row.kind is LedgerKind.MODEL:
            yield reading("kvoffload_ledger_tier_read_bytes_total", row.tier_read_bytes, **who)
            yield reading("kvoffload_ledger_tier_written_bytes_total", row.tier_written_bytes, **who)


def read_worth(worth: MemoryWorth) -> Iterator[Reading]:
    """Reads what other amounts of memory would have brought, by multiples of the server's; nothing if that is not
    known."""
    if worth.sizes:
        yield reading("kvoffload_memory_worth_window_seconds", worth.span_s)
    for size in worth.sizes:
        memory = f"{size.memory:g}"
        yield reading("kvoffload_memory_worth_seconds", size.saved_s, memory=memory)
        yield reading("kvoffload_memory_worth_error_seconds", size.error_s, memory=memory)
        if size.price is not None:
            yield reading("kvoffload_memory_worth_price", size.price, memory=memory)
            yield reading("kvoffload_memory_worth_price_error", size.price_error, memory=memory)
    if worth.wanted_bytes is not None:
        yield reading("kvoffload_memory_wanted_change_bytes", worth.wanted_bytes)


def read_differing(survey: EngineSurvey | None) -> Iterator[Reading]:
    """Reads how many pairs of engines share no blocks because a setting differs, if the server told it."""
    if survey is not None:
        yield reading("kvoffload_differing_engines", len(survey.find_differing()))


def read_ignored(ignored: Mapping[str, int]) -> Iterator[Reading]:
    """Reads what was ignored of hints over HTTP, by why."""
    for reason, count in ignored.items():
        yield reading("kvoffload_hint_ignored_total", count, reason=reason)


def _read_places(stats: CacheStats) -> Iterator[Reading]:
    rows = [(MEMORY, "", stats.capacity_bytes, stats.used_bytes, stats.readable)]
    rows += [(place.tier, place.name, place.capacity_bytes, place.used_bytes, place.records) for place in stats.places]
    for tier, place, capacity, used, entries in rows:
        yield reading("kvoffload_capacity_bytes", capacity, tier=tier, place=place)
        yield reading("kvoffload_used_bytes", used, tier=tier, place=place)
        yield reading("kvoffload_entries", entries, tier=tier, place=place)
    for one in stats.places:
        yield reading("kvoffload_tier_ready", float(one.state == "ready"), tier=one.tier, place=one.name)
        for name, count in (
            ("kvoffload_tier_coded_records_total", one.coded_records),
            ("kvoffload_tier_coded_bytes_total", one.coded_bytes),
            ("kvoffload_tier_coded_stored_bytes_total", one.coded_stored_bytes),
        ):
            yield reading(name, count, tier=one.tier, place=one.name)


def _read_traffic(tier: str, counts: Mapping[str, int]) -> Iterator[Reading]:
    """Reads a tier's traffic. Counts that only a newer server has are left out."""
    for field, name in _TRAFFIC.items():
        yield reading(name, counts.get(field, 0), tier=tier)
    for field, reason in _DROPPED.items():
        yield reading("kvoffload_tier_dropped_blocks_total", counts.get(field, 0), tier=tier, reason=reason)
    for field, reason in _UNSERVED.items():
        yield reading("kvoffload_tier_unserved_requests_total", counts.get(field, 0), tier=tier, reason=reason)

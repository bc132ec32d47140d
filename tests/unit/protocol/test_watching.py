"""Counts are those of the cache; events name blocks."""

from __future__ import annotations

from dataclasses import fields

from kvoffload.cache import CacheStats, TenantUsage
from kvoffload.protocol import MESSAGES, Counts, TenantCounts
from kvoffload.protocol.message import CONTROL, Event


def test_all_counts_of_the_cache_are_told() -> None:
    assert [*(field.name for field in fields(Counts)), "residence"] == [field.name for field in fields(CacheStats)]
    assert [field.name for field in fields(TenantCounts)] == [field.name for field in fields(TenantUsage)]


def test_every_event_of_a_namespace_names_it_first() -> None:
    for message in MESSAGES:
        if issubclass(message, Event) and message.channels == CONTROL:
            first = fields(message)[0].name  # type: ignore[arg-type]
            assert first == ("count" if message.__name__ == "EventsLost" else "name_space")

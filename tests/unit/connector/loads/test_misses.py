"""Reasons are labels of metrics and words of log lines: whoever counts them knows them by these names."""

from __future__ import annotations

from kvoffload.connector.loads.misses import MissReason


def test_labels_are_what_they_were() -> None:
    assert [str(reason) for reason in MissReason] == [
        "never_seen",
        "too_short",
        "not_served",
        "refused",
        "slow_to_answer",
        "no_room",
        "slower_than_computing",
        "tier_too_slow",
        "skipped",
    ]

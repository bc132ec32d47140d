"""tiers: records by key in places that are larger and slower than memory; their digests are checked on the way.

It must not decide what to keep, nor wait for a place that does not answer.
"""

from kvoffload.tiers.base import (
    FinishedBatch,
    RecordBatch,
    RecordNames,
    RecordOutcome,
    ScanPage,
    Tier,
    TierHealth,
    TierState,
)

__all__ = [
    "FinishedBatch",
    "RecordBatch",
    "RecordNames",
    "RecordOutcome",
    "ScanPage",
    "Tier",
    "TierHealth",
    "TierState",
]

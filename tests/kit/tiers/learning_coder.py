"""A tier that codes as it sees fit, once it knows what reading takes: the same check for every remote store."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

from kvoffload.tiers.base import RecordOutcome
from kvoffload.tiers.coding_choice import KNOWN_BYTES
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.remote import RemoteTier
from tests.kit.tiers.tier_contract import Records, get, put

_RECORD_BYTES = 1 << 20


def check_learning(make_tier: Callable[[RecordCoder], RemoteTier]) -> None:
    """Plain records are read from a store that is slow by the coder's clock. Then records are coded, and not before."""
    records = KNOWN_BYTES // _RECORD_BYTES
    writer = make_tier(RecordCoder())
    written = Records(0, records, _RECORD_BYTES, filled=True)
    assert put(writer, written).count(RecordOutcome.WRITTEN) == records
    writer.close()
    coder = RecordCoder(Coding.AUTO, clock=count().__next__)
    tier = make_tier(coder)
    for first, is_coded in ((2000, False), (2001, True)):
        assert put(tier, Records(first, 1, 20_000, filled=True, has_numbers=True)).count(RecordOutcome.WRITTEN) == 1
        assert coder.counts.get("coded_records", 0) == is_coded
        assert get(tier, Records(0, records, _RECORD_BYTES, filled=False)).count(RecordOutcome.FOUND) == records
    tier.close()

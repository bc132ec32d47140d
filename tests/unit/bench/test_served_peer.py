"""Of another server everything lives there, and its tier is ready."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from kvoffload.bench.served_peer import PeerPlace, always_there, serve_peer, teach
from kvoffload.tiers.base import RecordOutcome, TierState
from kvoffload.tiers.record_coder import Coding
from kvoffload.units import MIB
from tests.kit.server.tiers import await_that
from tests.kit.tiers.tier_contract import FINGERPRINT, TIMEOUT_S, Records, finish, get, put


def test_what_is_put_there_comes_back() -> None:
    with serve_peer(64 * MIB, PeerPlace(is_sealed=True)) as (tier, spaces, _):
        assert [one.state for one in tier.health()] == [TierState.READY]
        teach(spaces, FINGERPRINT, 5000)
        written, read = Records(0, 3, 5000, filled=True), Records(0, 3, 5000, filled=False)
        put(tier, written)
        get(tier, read)
        assert np.array_equal(written.memory, read.memory)


RECORD_BYTES = 1 * MIB


@pytest.mark.parametrize("is_sealed", [True, False], ids=["sealed", "trusted"])
def test_between_two_servers_records_are_coded_both_ways_and_come_back_as_they_were(is_sealed: bool) -> None:
    with serve_peer(64 * MIB, PeerPlace(is_sealed=is_sealed, compress=Coding.ON)) as (tier, spaces, _):
        teach(spaces, FINGERPRINT, RECORD_BYTES)
        written = Records(0, 8, RECORD_BYTES, filled=True, has_numbers=True)
        assert put(tier, written).count(RecordOutcome.WRITTEN) == 8
        assert tier.health()[0].counts["coded_records"] == 8
        read = Records(0, 8, RECORD_BYTES, filled=False)
        assert get(tier, read).count(RecordOutcome.FOUND) == 8
        assert np.array_equal(written.memory, read.memory)
        counts = tier.health()[0].counts
        assert (counts["coded_records"], counts["coded_bytes"]) == (16, 16 * RECORD_BYTES)
        assert 0 < counts["coded_stored_bytes"] < 0.8 * counts["coded_bytes"]


@pytest.mark.parametrize("verb", ["put", "get"])
def test_a_server_that_is_killed_while_coded_records_travel_costs_misses_alone(verb: str) -> None:
    """It is stopped first, so that all links are in the middle of something."""
    with serve_peer(256 * MIB, PeerPlace(is_sealed=False, compress=Coding.ON)) as (tier, spaces, child):
        teach(spaces, FINGERPRINT, RECORD_BYTES)
        records = Records(0, 64, RECORD_BYTES, filled=True, has_numbers=True)
        # The identity has been introduced before.
        put(tier, Records(100, 1, RECORD_BYTES, filled=True) if verb == "put" else records)
        read = Records(0, 64, RECORD_BYTES, filled=False)
        ticket = (
            tier.put(records.batch(), timeout_s=TIMEOUT_S)
            if verb == "put"
            else tier.get(read.names, read.slots, record_bytes=RECORD_BYTES, timeout_s=TIMEOUT_S)
        )
        child.stop()
        child.signal(signal.SIGKILL)
        ended = finish(tier, ticket)
        good = ended.outcomes == (RecordOutcome.WRITTEN if verb == "put" else RecordOutcome.FOUND)
        assert set(ended.outcomes[~good]) <= {RecordOutcome.UNAVAILABLE}
        if verb == "get":
            assert np.array_equal(read.memory[good], records.memory[good])
        await_that(lambda: tier.health()[0].state is TierState.ABSENT)


@pytest.mark.parametrize("members", [("here", "there"), ("a", "here"), ("here",)])
def test_nothing_lives_here_if_anybody_else_is_there(members: tuple[str, ...]) -> None:
    found = np.array(members)[always_there(members, bytes(32 * 3))]
    assert set(found) == {"here"} if members == ("here",) else "here" not in found

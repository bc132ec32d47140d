"""Of another server everything lives there, and its tier is ready."""

from __future__ import annotations

import numpy as np
import pytest

from kvoffload.bench.served_peer import always_there, serve_peer, teach
from kvoffload.tiers.base import TierState
from kvoffload.units import MIB
from tests.kit.tiers.tier_contract import FINGERPRINT, Records, get, put


def test_what_is_put_there_comes_back() -> None:
    with serve_peer(64 * MIB, is_sealed=True) as (tier, spaces):
        assert [one.state for one in tier.health()] == [TierState.READY]
        teach(spaces, FINGERPRINT, 5000)
        written, read = Records(0, 3, 5000, filled=True), Records(0, 3, 5000, filled=False)
        put(tier, written)
        get(tier, read)
        assert np.array_equal(written.memory, read.memory)


@pytest.mark.parametrize("members", [("here", "there"), ("a", "here"), ("here",)])
def test_nothing_lives_here_if_anybody_else_is_there(members: tuple[str, ...]) -> None:
    found = np.array(members)[always_there(members, bytes(32 * 3))]
    assert set(found) == {"here"} if members == ("here",) else "here" not in found

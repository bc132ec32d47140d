"""Damaged records are reported in one line now and then, with their number."""

from __future__ import annotations

import pytest

from kvoffload.tiers.damage_log import EVERY_S, DamageLog


def test_the_first_ones_are_reported_at_once_and_the_next_ones_together(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1000.0
    log = DamageLog("the store", clock=lambda: now_s)
    log.note(0)
    assert not caplog.messages
    log.note(2)
    log.note(3)
    log.note(4)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the store: 2 records are misses: damaged, not sealed, or sealed with a key")
    now_s += EVERY_S
    log.note(0)
    log.note(5)
    assert [message.split(" records")[0] for message in caplog.messages[1:]] == ["the store: 7"]

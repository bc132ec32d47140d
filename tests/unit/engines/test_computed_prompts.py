"""A line says why stored prompts were computed: with their count, the reason and the settings, and not too often."""

from __future__ import annotations

import logging

import pytest

from kvoffload.config.settings import Settings
from kvoffload.engines.computed_prompts import LINE_PAUSE_S, ComputedPrompts
from kvoffload.protocol import Miss


def test_a_choice_that_is_as_it_should_be_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    computed = ComputedPrompts(lambda: now_s[0])
    with caplog.at_level(logging.INFO):
        computed.note("a", Miss.SLOWER_THAN_COMPUTING, "")
        now_s[0] += LINE_PAUSE_S
        computed.note("b", Miss.SLOW_TO_ANSWER, "")
    assert [row.levelno for row in caplog.records] == [logging.INFO, logging.WARNING]


@pytest.mark.parametrize("reason", [reason for reason in Miss if Miss.TOO_SHORT < reason < Miss.SKIPPED])
def test_a_line_has_our_name_the_reason_and_settings_that_there_are(
    reason: Miss, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        ComputedPrompts(lambda: 0.0).note("a", reason, "")
    (line,) = caplog.messages
    assert line.startswith("kvoffload: ")
    assert f"({reason.label} 1)" in line
    _, _, named = line.partition("; settings: ")
    assert set(filter(None, named.split(", "))) <= set(Settings.model_fields)
    assert named or reason is Miss.NO_ROOM

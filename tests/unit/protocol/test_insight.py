"""Reports of prompts have names of blocks at most, and every reason that an engine gives has a number in the
protocol."""

from __future__ import annotations

from kvoffload.protocol import CAPABILITIES, Clear, Explain, Inspect, Miss, SetQuota
from kvoffload.protocol.limits import MAX_NAMED_COUNTS
from kvoffload.protocol.message import CONTROL, Phase


def test_engines_explain_and_everybody_may_look() -> None:
    assert Explain.needs is Phase.REGISTERED
    assert Inspect.needs is Clear.needs is SetQuota.needs is Phase.GREETED
    for message in (Explain, Inspect, Clear, SetQuota):
        assert message.capability in CAPABILITIES
        assert message.channels == CONTROL


def test_a_token_is_in_no_text_of_a_message_by_accident() -> None:
    assert Clear().token == SetQuota(tenant="a", quota_bytes=1).token == ""


def test_insight_has_room_for_a_count_of_every_reason() -> None:
    assert len(Miss) + 2 <= MAX_NAMED_COUNTS

"""What the core wants to be sent."""

from __future__ import annotations

from kvoffload.daemon import ToLifeline
from kvoffload.protocol import Closing, ClosingReason


def test_an_event_of_a_lifeline_is_counted_by_its_sender() -> None:
    assert ToLifeline(1, Closing(reason=ClosingReason.ENDED)).number == 0

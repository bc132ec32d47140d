"""Messages that the core has for its clients."""

from __future__ import annotations

from kvoffload.protocol import Closing, ClosingReason
from kvoffload.server import ToLifeline


def test_an_event_of_a_lifeline_is_counted_by_its_sender() -> None:
    assert ToLifeline(1, Closing(reason=ClosingReason.ENDED)).number == 0

"""Each warning of a server is in the engine's log once, and a server that warns of much cannot fill it."""

from __future__ import annotations

import pytest

from kvoffload.client.server_warnings import MOST_LINES, ServerWarnings
from kvoffload.protocol import Warned

FIRST, SECOND = 11, 12


def test_what_a_server_tells_again_is_old(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ServerWarnings()
    for number, text in ((3, "c"), (4, "d"), (3, "c"), (4, "d"), (6, "f")):
        warnings.hear(Warned(number=number, message=text), FIRST)
    assert caplog.messages == [f"the cache server warns: {text}" for text in "cdf"]
    assert warnings.count == 3


def test_another_server_counts_from_its_own_beginning(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ServerWarnings()
    warnings.hear(Warned(number=7, message="old"), FIRST)
    warnings.hear(Warned(number=1, message="new"), SECOND)
    assert caplog.messages == ["the cache server warns: old", "the cache server warns: new"]
    assert warnings.count == 2


def test_beyond_a_number_they_are_counted_alone(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ServerWarnings()
    for number in range(1, MOST_LINES + 50):
        warnings.hear(Warned(number=number, message="again"), FIRST)
    assert len(caplog.messages) == MOST_LINES
    assert caplog.messages[-1].endswith("what follows is in its own log alone")
    assert warnings.count == MOST_LINES + 49

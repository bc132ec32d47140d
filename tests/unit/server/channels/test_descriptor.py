"""A received descriptor is taken once, or closed once."""

from __future__ import annotations

import os

import pytest

from kvoffload.server.channels.descriptor import ReceivedDescriptor


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


@pytest.mark.parametrize("ends_by", ["close", "forgetting"])
def test_what_is_not_taken_is_closed(ends_by: str) -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    received: ReceivedDescriptor | None = ReceivedDescriptor(number)
    if ends_by == "close":
        assert received is not None
        received.close()
        received.close()
    received = None
    assert not is_open(number)


def test_what_is_taken_stays() -> None:
    number = os.open(os.devnull, os.O_RDONLY)
    received = ReceivedDescriptor(number)
    assert received.take() == number
    received.close()
    del received
    assert is_open(number)
    os.close(number)

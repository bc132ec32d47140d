"""Rules of all messages."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest

from kvoffload.protocol import MESSAGES, PROTOCOL_MAX, PROTOCOL_MIN, Acquire, Channel, Phase


def test_messages_are_frozen_and_take_keywords() -> None:
    message = Acquire(name_space=1, chain=b"")
    with pytest.raises(FrozenInstanceError):
        message.local = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        Acquire(1, b"")  # type: ignore[misc]
    assert all(kind.__dataclass_params__.frozen for kind in MESSAGES)  # type: ignore[attr-defined]


def test_versions_channels_and_phases_are_in_order() -> None:
    assert 1 <= PROTOCOL_MIN <= PROTOCOL_MAX
    assert all(message.since <= PROTOCOL_MAX for message in MESSAGES)
    assert Channel.LIFELINE.limit_bytes < Channel.CONTROL.limit_bytes
    assert Phase.NEW < Phase.GREETED < Phase.REGISTERED

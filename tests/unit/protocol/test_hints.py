"""A hint is of engines and of operators; what it says is bounded, and a list of what is retained is for operators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvoffload.errors import ProtocolError
from kvoffload.protocol import CAPABILITIES, CODEC, Channel, Hint, HintAction
from kvoffload.protocol.hints import ACTION_TYPES, MAX_PRIORITY, MAX_TTL_MS, ListRetained
from kvoffload.protocol.message import Phase

PLAIN = Hint(name_space=1, action=HintAction.RETAIN)


def encode(hint: Hint) -> bytes:
    return CODEC.encode_call(hint, number=1, session=1, expires_ns=0, channel=Channel.CONTROL)


def test_both_are_of_one_capability() -> None:
    for message in (Hint, ListRetained):
        assert message.capability in CAPABILITIES
        assert message.needs is Phase.GREETED
    assert ListRetained.is_for_operators
    assert not Hint.is_for_operators


def test_envelopes_have_a_name_for_each_action() -> None:
    assert sorted(ACTION_TYPES.values()) == sorted(HintAction)


@pytest.mark.parametrize(
    "wrong", [{"priority": MAX_PRIORITY + 1}, {"ttl_ms": MAX_TTL_MS + 1}, {"chain": b"short"}, {"session": "a\nb"}]
)
def test_what_is_not_allowed_is_not_sent(wrong: dict[str, object]) -> None:
    assert encode(PLAIN)
    with pytest.raises(ProtocolError, match=next(iter(wrong))):
        encode(replace(PLAIN, **wrong))  # type: ignore[arg-type]

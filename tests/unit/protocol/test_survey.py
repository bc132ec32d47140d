"""Requests of operators have a field for their token, and no answer has a token of a prompt."""

from __future__ import annotations

from kvoffload.protocol import CAPABILITIES, MESSAGES, ClientMessage, Hint
from kvoffload.protocol.message import Phase
from kvoffload.protocol.survey import FindBlocks, FindPrefix, FollowBlock, ListJoined, ReadIdentity, ReadReport


def test_all_of_it_is_for_operators() -> None:
    for message in (ListJoined, ReadReport, ReadIdentity, FindBlocks, FollowBlock, FindPrefix):
        assert message.is_for_operators
        assert message.needs is Phase.GREETED
        assert message.capability in CAPABILITIES


def test_whatever_is_for_operators_has_a_token_and_nothing_else_has_but_a_hint() -> None:
    """A hint of an engine's own blocks needs none."""
    for message in MESSAGES:
        if issubclass(message, ClientMessage) and message is not Hint:
            assert ("token" in message.__annotations__) == message.is_for_operators, message

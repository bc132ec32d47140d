"""The set of messages as one."""

from __future__ import annotations

import pytest

from kvoffload.protocol import CAPABILITIES, MESSAGES, Channel, ClientMessage, Phase
from kvoffload.protocol.fields import Several, Whole
from kvoffload.protocol.message import ONE_WAY_OPS, Event, Message, OneWay, Reply, Request, ServerMessage
from kvoffload.protocol.shape import Shape, name_of


def walk(root: type[Message]) -> set[type[Message]]:
    found = {root} if "op" in vars(root) and root.__module__.startswith("kvoffload.") else set()
    return found.union(*(walk(child) for child in root.__subclasses__()))


def test_every_declared_message_is_listed_once() -> None:
    assert len(set(MESSAGES)) == len(MESSAGES)
    assert set(MESSAGES) == walk(Message)


def test_numbers_and_names_are_used_once() -> None:
    assert len({message.op for message in MESSAGES}) == len(MESSAGES)
    assert len({name_of(message) for message in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_number_says_direction_and_kind(message: type[Message]) -> None:
    is_lifeline = message.channels == (Channel.LIFELINE,)
    if issubclass(message, ClientMessage):
        assert message.op in (
            range(48, 64) if is_lifeline else range(1, 32) if issubclass(message, Request) else ONE_WAY_OPS
        )
    else:
        assert message.op in (
            range(112, 128) if is_lifeline else range(64, 96) if issubclass(message, Reply) else range(96, 112)
        )


@pytest.mark.parametrize("message", MESSAGES)
def test_every_message_and_field_says_what_it_is_for(message: type[Message]) -> None:
    assert (message.__doc__ or "").strip().endswith(".")
    assert not (message.__doc__ or "").startswith(message.__name__ + "(")
    assert all(field.help for field in Shape(message).fields)
    kinds = [kind for kind in (Request, OneWay, Reply, Event) if issubclass(message, kind)]
    assert len(kinds) == 1
    assert issubclass(message, ClientMessage) is not issubclass(message, ServerMessage)


def test_all_capabilities_are_listed_and_needed() -> None:
    needed = {message.capability for message in MESSAGES if issubclass(message, ClientMessage)}
    assert needed - {""} == CAPABILITIES


def test_the_lifeline_needs_no_handshake_of_the_control_channel() -> None:
    for message in MESSAGES:
        if issubclass(message, ClientMessage) and Channel.LIFELINE in message.channels:
            assert message.needs is Phase.NEW


def test_no_message_has_a_field_for_tokens_or_bytes_of_a_cache() -> None:
    """How many tokens there are may be said, by what came of them too."""
    fields = [field for message in MESSAGES for field in Shape(message).fields]
    names = {field.name for field in fields if not isinstance(field.kind, Whole | Several)}
    assert not {name for name in names if "token" in name} - {"token"}
    assert not names & {"data", "payload", "pages", "records"}

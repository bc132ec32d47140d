"""Released versions do not change: names, numbers, limits, defaults and bytes."""

from __future__ import annotations

import tomllib
from dataclasses import make_dataclass
from typing import Annotated, Any

import pytest

from kvoffload.protocol import CODEC, MESSAGES, PROTOCOL_MAX, PROTOCOL_MIN, Channel, ClientMessage, Codec
from kvoffload.protocol.fields import U16, U32, Name, Since
from kvoffload.protocol.message import Message, OneWay
from kvoffload.protocol.shape import Shape, name_of
from tests.kit.protocol.examples import make_example
from tests.kit.protocol.golden import (
    BOOT_ID,
    EXPIRES_NS,
    FOLDER,
    NUMBER,
    SESSION,
    golden_file,
    messages_of,
    render_golden,
    show,
)
from tests.kit.protocol.version_two import CODEC_TWO, MESSAGES_TWO

VERSIONS = range(PROTOCOL_MIN, PROTOCOL_MAX + 1)
CASES = [(version, message) for version in VERSIONS for message in messages_of(version, MESSAGES)]


def read_golden(version: int) -> Any:
    return tomllib.loads(golden_file(version).read_text())["message"]


def decode(frame: bytes, message: type[Message], codec: Codec = CODEC) -> Any:
    channel: Channel = message.channels[0]
    if issubclass(message, ClientMessage):
        return codec.decode_call(frame, channel=channel)
    return codec.decode_answer(frame, channel=channel)


def encode(example: Any, codec: Codec = CODEC) -> bytes:
    channel: Channel = example.channels[0]
    if isinstance(example, ClientMessage):
        return codec.encode_call(example, number=NUMBER, session=SESSION, expires_ns=EXPIRES_NS, channel=channel)
    return codec.encode_answer(example, number=NUMBER, boot_id=BOOT_ID, channel=channel)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_released_version_has_not_changed(version: int) -> None:
    """If this fails: append the field with Since(next version) and a default, or the message with since = it, raise
    PROTOCOL_MAX, and write the new version's file."""
    assert render_golden(version) == golden_file(version).read_text()


def test_every_version_has_its_file_and_no_other_has_one() -> None:
    assert sorted(FOLDER.glob("protocol-*")) == [golden_file(version) for version in range(1, PROTOCOL_MAX + 1)]


@pytest.mark.parametrize(("version", "message"), CASES)
def test_released_bytes_are_still_read(version: int, message: type[Message]) -> None:
    golden = read_golden(version)[name_of(message)]
    found = decode(bytes.fromhex(golden["frame"]), message)
    assert found.message == make_example(Shape(message), version=version)
    assert found.number == NUMBER
    for field in golden["fields"]:
        assert show(getattr(found.message, field["name"]), version) == field["example"]


@pytest.mark.parametrize("message", MESSAGES)
def test_the_newest_bytes_are_what_we_send(message: type[Message]) -> None:
    golden = read_golden(PROTOCOL_MAX)[name_of(message)]
    assert encode(make_example(Shape(message), version=PROTOCOL_MAX)).hex() == golden["frame"]


@pytest.mark.parametrize(("version", "message"), CASES)
def test_the_next_version_reads_them_too(version: int, message: type[Message]) -> None:
    successor = next(kind for kind in MESSAGES_TWO if kind.op == message.op)
    found = decode(bytes.fromhex(read_golden(version)[name_of(message)]["frame"]), successor, CODEC_TWO)
    assert found.message == make_example(Shape(successor), version=version)


def make_sample(*fields: Any, op: int = 40) -> tuple[type[Message], ...]:
    """A catalogue of one message."""
    return (make_dataclass("Sample", fields, bases=(OneWay,), namespace={"op": op}, frozen=True, kw_only=True),)


GROUP = ("group", Annotated[U16, "its number"])
NOTE = ("note", Annotated[Name, "for logs"], "none")
MORE = ("more", Annotated[U32, "appended"], 7)
SAMPLE = render_golden(1, make_sample(GROUP, NOTE))


@pytest.mark.parametrize(
    "messages",
    [
        make_sample(NOTE, ("group", GROUP[1], 0)),
        make_sample(("team", GROUP[1]), NOTE),
        make_sample(("group", Annotated[U32, "its number"]), NOTE),
        make_sample(GROUP, ("note", NOTE[1], "some")),
        make_sample(GROUP, ("note", NOTE[1])),
        make_sample(GROUP),
        make_sample(GROUP, NOTE, MORE),
        make_sample(GROUP, NOTE, op=41),
        (),
    ],
    ids=["moved", "renamed", "limit", "default", "required", "removed", "without version", "number", "gone"],
)
def test_a_change_of_a_released_message_is_seen(messages: tuple[type[Message], ...]) -> None:
    assert render_golden(1, messages) != SAMPLE


def test_an_appended_field_with_version_and_default_is_allowed() -> None:
    messages = make_sample(GROUP, NOTE, ("more", Annotated[U32, "appended", Since(2)], 7))
    assert render_golden(1, messages) == SAMPLE
    assert render_golden(2, messages) != SAMPLE
    assert render_golden(1, MESSAGES_TWO) == render_golden(1)


@pytest.mark.parametrize(
    "fields",
    [
        [("note", NOTE[1], "none"), GROUP],
        [GROUP, ("more", Annotated[U32, "appended", Since(2)])],
        [GROUP, ("more", Annotated[U32, "appended", Since(2)], 7), ("late", Annotated[U32, "appended"], 7)],
    ],
    ids=["a default before a required field", "appended without default", "older than the one before"],
)
def test_a_declaration_that_cannot_be_appended_to_is_refused(fields: Any) -> None:
    with pytest.raises(AssertionError, match=r"needs a default|older"):
        Shape(make_sample(*fields)[0])

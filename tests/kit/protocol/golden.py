"""A released protocol version as text: every message, its fields, one example and its bytes.

`python -m tests.kit.protocol.golden` writes the file of a new version. It never writes over one: a released version
does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgpack

from kvoffload.protocol import MESSAGES, PROTOCOL_MAX, ClientMessage
from kvoffload.protocol.fields import Several
from kvoffload.protocol.message import Event, Message, OneWay, Reply, Request
from kvoffload.protocol.shape import FieldSpec, Shape, name_of
from tests.house.tree import ROOT
from tests.kit.protocol.examples import make_example

FOLDER = ROOT / "tests" / "golden"
NUMBER, SESSION, EXPIRES_NS, BOOT_ID = 258, 2**63 + 1, 2**40 + 3, 2**62 + 5


def golden_file(version: int) -> Any:
    return FOLDER / f"protocol-v{version}.toml"


def messages_of(version: int, messages: tuple[type[Message], ...]) -> list[type[Message]]:
    return [message for message in messages if message.since <= version]


def render_golden(version: int, messages: tuple[type[Message], ...] = MESSAGES) -> str:
    """Renders the whole file. `allowed` and `default` hold a declaration still, `frame` its bytes."""
    known = messages_of(version, messages)
    parts = [f"# Protocol version {version}. Made from the declarations once; never to be changed afterwards.\n"]
    for shape in _find_rows(known):
        parts += [f"[row.{name_of(shape.record)}]", *_render_fields(shape, None, version), ""]
    for message in known:
        shape = Shape(message)
        example = make_example(shape, version=version)
        parts += [
            f"[message.{name_of(message)}]",
            f"op = {message.op}",
            f'kind = "{_kind(message)}"',
            f'channels = "{" ".join(channel.value for channel in message.channels)}"',
            f'descriptors = "{message.descriptors}"',
            *_render_fields(shape, example, version),
            f'frame = "{make_frame(example, version).hex()}"',
            "",
        ]
    return "\n".join(parts)


def make_frame(example: Any, version: int) -> bytes:
    """Makes what a peer of this version sends: its fields, and none that came later."""
    head = (NUMBER, SESSION, EXPIRES_NS) if isinstance(example, ClientMessage) else (NUMBER, BOOT_ID)
    packed = msgpack.packb((example.op, *head, *_lower(Shape(type(example)), example, version)))
    assert isinstance(packed, bytes)
    return packed


def show(value: Any, version: int) -> str:
    """A value as people read it in the file; of a row, the fields that the version has."""
    match value:
        case bytes():
            return value.hex()
        case IntEnum():
            return value.name
        case tuple():
            return "; ".join(show(item, version) for item in value)
        case bool() | int() | str():
            return str(value)
    names = [field.name for field in Shape(type(value)).fields if field.since <= version]
    return ", ".join(f"{name}={show(getattr(value, name), version)}" for name in names)


def _lower(shape: Shape, record: Any, version: int) -> Iterator[Any]:
    for field in shape.fields:
        if field.since > version:
            return
        value = getattr(record, field.name)
        if isinstance(field.kind, Several) and isinstance(field.kind.item, Shape):
            yield [list(_lower(field.kind.item, row, version)) for row in value]
        else:
            yield field.kind.lower(value)


def _render_fields(shape: Shape, example: Any, version: int) -> Iterator[str]:
    yield "fields = ["
    for field in shape.fields:
        if field.since <= version:
            shown = "" if example is None else f', example = "{show(getattr(example, field.name), version)}"'
            declared = f'allowed = "{_allowed(field)}", default = "{_default(field, version)}"'
            yield f'  {{ name = "{field.name}", {declared}{shown} }},'
    yield "]"


def _allowed(field: FieldSpec) -> str:
    return field.kind.describe() + (f"; {field.count.describe()}" if field.count else "")


def _default(field: FieldSpec, version: int) -> str:
    return "required" if field.is_required else show(field.default, version)


def _find_rows(messages: list[type[Message]]) -> list[Shape]:
    kinds = (field.kind for message in messages for field in Shape(message).fields)
    rows = (kind.item for kind in kinds if isinstance(kind, Several) and isinstance(kind.item, Shape))
    return list({row.record: row for row in rows}.values())


def _kind(message: type[Message]) -> str:
    if issubclass(message, Request):
        return f"request, answered by {name_of(message.reply)}"
    kinds = {OneWay: "one-way", Reply: "reply", Event: "event"}
    return next(text for kind, text in kinds.items() if issubclass(message, kind))


if __name__ == "__main__":
    with golden_file(PROTOCOL_MAX).open("x") as stream:
        stream.write(render_golden(PROTOCOL_MAX))

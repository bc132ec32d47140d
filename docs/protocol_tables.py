"""The page of all messages, from their declarations."""

from __future__ import annotations

import ast
import inspect
from enum import IntEnum
from textwrap import dedent

from docs.table import render_table
from kvoffload.protocol import MESSAGES, PROTOCOL_MAX, PROTOCOL_MIN, Channel, ClientMessage, ErrorCode, Phase
from kvoffload.protocol.fields import Choice, Several
from kvoffload.protocol.limits import ARRAY_ITEMS, FRAME_ARRAYS
from kvoffload.protocol.message import Event, Message, OneWay, Request
from kvoffload.protocol.shape import FieldSpec, Shape, name_of

INTRO = """Versions {low} to {high}. [protocol.md](protocol.md) says how they are used. A field without default is
required. Its position is that in the frame's array; before it comes the head, `[op, number, session, expires_ns]` from
a client and `[op, number, boot_id]` from a server."""

NEEDS = {Phase.NEW: "", Phase.GREETED: "After hello.", Phase.REGISTERED: "After register."}


def render_protocol(note: str) -> str:
    """The whole page."""
    lines = ["# Protocol messages", "", note, "", INTRO.format(low=PROTOCOL_MIN, high=PROTOCOL_MAX), ""]
    lines += ["## Overview", "", *_overview(), ""]
    lines += ["## Limits of every frame", "", *_limits(), ""]
    lines += ["## Error codes", "", *_error_codes(), ""]
    lines += ["## Messages", ""]
    for message in MESSAGES:
        lines += _message(message)
    lines += ["## Rows", "", "Arrays inside a message's array. They grow like messages.", ""]
    for rows in _find_rows():
        lines += [f"### {name_of(rows.record)}", "", _text(rows.record), "", *_fields(rows, 0), ""]
    lines += ["## Numbers with names", ""]
    for names in _find_choices():
        rows = [[str(name.value), name.name, _member_texts(names).get(name.name, "")] for name in names]
        lines += [f"### {name_of(names)}", "", _text(names), "", *render_table(["number", "name", "meaning"], rows), ""]
    return "\n".join(lines)


def _overview() -> list[str]:
    rows = [
        [str(message.op), f"[`{name_of(message)}`](#{name_of(message)})", _kind(message), _channels(message)]
        for message in sorted(MESSAGES, key=lambda message: message.op)
    ]
    return render_table(["op", "message", "kind", "channel"], rows)


def _limits() -> list[str]:
    rows = [
        ["bytes of a frame on the control or the express channel", f"{Channel.CONTROL.limit_bytes:,}"],
        ["bytes of a packet on the lifeline", f"{Channel.LIFELINE.limit_bytes:,}"],
        ["items of any array", str(ARRAY_ITEMS)],
        ["arrays in one frame, the frame's own and all nested ones", str(FRAME_ARRAYS)],
        ["msgpack types", "array, whole number, true, false, text (UTF-8), byte string; no map, extension, float, nil"],
    ]
    return render_table(["what", "limit"], rows)


def _error_codes() -> list[str]:
    texts = _member_texts(ErrorCode)
    rows = [[str(code.value), code.name, "yes" if code.is_retryable else "no", texts[code.name]] for code in ErrorCode]
    return render_table(["code", "name", "retryable", "meaning"], rows)


def _message(message: type[Message]) -> list[str]:
    about = [f"Operation {message.op}, {_kind(message)}, {_channels(message)}."]
    if issubclass(message, ClientMessage):
        about += [NEEDS[message.needs]] if message.needs else []
        about += [f"Needs capability `{message.capability}`."] if message.capability else []
    about += [f"Descriptors: {message.descriptors}."] if message.descriptors else []
    about += [f"Since version {message.since}."] if message.since > 1 else []
    shape = Shape(message)
    head = 4 if issubclass(message, ClientMessage) else 3
    table = _fields(shape, head) if shape.fields else ["No fields."]
    return [f"### {name_of(message)}", "", " ".join(about), "", _text(message), "", *table, ""]


def _fields(shape: Shape, head: int) -> list[str]:
    rows = [
        [str(head + at), f"`{field.name}`", _allowed(field), _default(field), _help(field)]
        for at, field in enumerate(shape.fields)
    ]
    return render_table(["position", "field", "allowed", "default", "meaning"], rows)


def _allowed(field: FieldSpec) -> str:
    kind = field.kind
    if isinstance(kind, Choice) and kind.names is ErrorCode:
        return "[error code](#error-codes)"
    if isinstance(kind, Choice):
        return f"[{name_of(kind.names)}](#{name_of(kind.names)})"
    if isinstance(kind, Several) and isinstance(kind.item, Shape):
        name = name_of(kind.item.record)
        return f"at most {kind.limit} [{name}](#{name})"
    return kind.describe() + (f"; {field.count.describe()}" if field.count else "")


def _default(field: FieldSpec) -> str:
    if field.is_required:
        return ""
    if isinstance(field.default, IntEnum):
        return field.default.name
    return str(field.default).lower() if isinstance(field.default, int) else "empty"


def _help(field: FieldSpec) -> str:
    return field.help + (f" (since version {field.since})" if field.since > 1 else "")


def _kind(message: type[Message]) -> str:
    if issubclass(message, Request):
        return f"request, answered by `{name_of(message.reply)}`"
    if issubclass(message, OneWay):
        return "one-way"
    return "event" if issubclass(message, Event) else "reply"


def _channels(message: type[Message]) -> str:
    return " and ".join(channel.value for channel in message.channels)


def _find_rows() -> list[Shape]:
    kinds = (field.kind for message in MESSAGES for field in Shape(message).fields)
    rows = (kind.item for kind in kinds if isinstance(kind, Several) and isinstance(kind.item, Shape))
    return list({found.record: found for found in rows}.values())


def _find_choices() -> list[type[IntEnum]]:
    shapes = [*(Shape(message) for message in MESSAGES), *_find_rows()]
    kinds = (field.kind for shape in shapes for field in shape.fields)
    return list(dict.fromkeys(kind.names for kind in kinds if isinstance(kind, Choice) and kind.names is not ErrorCode))


def _member_texts(names: type[IntEnum]) -> dict[str, str]:
    """The text below each member, which Python itself does not keep."""
    (declared,) = ast.parse(dedent(inspect.getsource(names))).body
    assert isinstance(declared, ast.ClassDef)
    texts = {}
    for member, text in zip(declared.body, declared.body[1:], strict=False):
        if isinstance(member, ast.Assign) and isinstance(text, ast.Expr):
            assert isinstance(member.targets[0], ast.Name)
            texts[member.targets[0].id] = " ".join(ast.literal_eval(text.value).split())
    return texts


def _text(declared: type) -> str:
    """Its docstring, a line for each paragraph."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in (declared.__doc__ or "").split("\n\n"))

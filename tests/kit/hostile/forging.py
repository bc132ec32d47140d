"""Messages of which a field is not what it should be, made from the declarations alone: a new one is among them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

import msgpack

from kvoffload.protocol.faults import FieldError
from kvoffload.protocol.fields import Blob, Choice, FieldKind, Several, Text, Truth, Whole
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.protocol.message import Message, OneWay
from kvoffload.protocol.shape import Shape, name_of
from kvoffload.types import HASH_BYTES

U64 = 2**64
LIVE_TICKETS = (0x4B56_4F54_494B_0001, 0x4B56_4F54_494B_0002)
LIVE_LEASES = (0x4B56_4F4C_4541_0001, 0x4B56_4F4C_4541_0002)
"""The process that sends a message puts its own present tickets and leases in the place of these."""
HEAD = ("op", "number", "session", "expires_ns")
_ITEMS = 2
"""Of right blobs and lists, so that those that belong together fit."""
_ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    -(2**63),
    U64 - 1,
    1.5,
    float("nan"),
    "",
    "x" * 600,
    b"",
    b"\xff" * 33,
    (),
    ((((),),),) * 3,
    (0,) * 255,
    {1: 2},
)
"""Of no kind, or of any."""
_LINES = ("", "\n", "a\nb", "\x00", "\u2028", "%s%n", "../../etc/passwd", "\u00e9" * 64, "x" * 127)


@dataclass(frozen=True, kw_only=True)
class Known:
    """Values that a process has seen, its own and those of others."""

    numbers: tuple[int, ...] = ()
    """Tickets, leases, addresses, sessions, boot ids, inodes."""
    hashes: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    """Right values, by the field's name, as a frame has them."""


@dataclass(frozen=True, kw_only=True)
class Forged:
    """`head` has None where the sender's own numbers go."""

    what: str
    """The field, as acquire.chain or register.groups.window."""
    op: Any
    is_one_way: bool
    fields: tuple[Any, ...]
    head: tuple[Any, Any, Any] = (None, None, 0)

    def pack(self, *, number: int, session: int) -> bytes:
        own = (number, session, 0)
        head = (mine if given is None else given for given, mine in zip(self.head, own, strict=True))
        frame = msgpack.packb((self.op, *head, *self.fields))
        assert isinstance(frame, bytes)
        return frame


def forge_in_turn(messages: Iterable[type[Message]], known: Known) -> Iterator[Forged]:
    """Every field of every message and of its rows, and of the head, with each of its lies; all else is right."""
    for kind in messages:
        yield _make(kind, known, "")
        fields = _right_record(Shape(kind), known)
        for path, forged in _forge_record(Shape(kind), fields, known):
            yield _make(kind, known, path, forged)
        for place, name in enumerate(HEAD):
            for lie in _lies_about_whole(Whole(U64 - 1), known):
                yield _with_head(_make(kind, known, name), place, lie)


def forge_one(messages: tuple[type[Message], ...], known: Known, chance: Random) -> Forged:
    """Any of them, with up to three of its fields forged; now and then the head, too."""
    kind = chance.choice(messages)
    shape = Shape(kind)
    right = _right_record(shape, known)
    fields = list(right)
    names = []
    for _ in range(chance.randint(0, 3) if fields else 0):
        at = chance.randrange(len(fields))
        names.append(shape.fields[at].name)
        fields[at] = chance.choice(list(_lies_about(shape.fields[at].kind, right[at], known)))[1]
    if chance.random() < 0.1:
        fields = fields[: chance.randint(0, len(fields))]
    made = _make(kind, known, "+".join(names), tuple(fields))
    if chance.random() < 0.1:
        place = chance.randrange(len(HEAD))
        made = _with_head(made, place, chance.choice([*_ODD, *_lies_about_whole(Whole(U64 - 1), known)]))
    return made


def _make(kind: type[Message], known: Known, path: str, fields: tuple[Any, ...] | None = None) -> Forged:
    return Forged(
        what=f"{name_of(kind)}.{path}",
        op=kind.op,
        is_one_way=issubclass(kind, OneWay),
        fields=_right_record(Shape(kind), known) if fields is None else fields,
    )


def _with_head(made: Forged, place: int, lie: Any) -> Forged:
    if place == 0:
        return Forged(what=made.what, op=lie, is_one_way=made.is_one_way, fields=made.fields, head=made.head)
    head = list(made.head)
    head[place - 1] = 0 if lie is None else lie
    number, session, expires_ns = head
    return Forged(
        what=made.what,
        op=made.op,
        is_one_way=made.is_one_way,
        fields=made.fields,
        head=(number, session, expires_ns),
    )


def fill_in(value: Any, live: Mapping[int, int]) -> Any:
    """A field with what these numbers stand for, alone or in a blob."""
    if isinstance(value, tuple):
        return tuple(fill_in(item, live) for item in value)
    if isinstance(value, bytes):
        for number, own in live.items():
            value = value.replace(number.to_bytes(8, "little"), own.to_bytes(8, "little"))
        return value
    return live.get(value, value) if type(value) is int else value


# ---- what is right ----


def _right_record(shape: Shape, known: Known) -> tuple[Any, ...]:
    return tuple(
        known.fields[field.name] if _fits(field.kind, known.fields.get(field.name)) else _right(field.kind, known)
        for field in shape.fields
    )


def _fits(kind: FieldKind, value: Any) -> bool:
    """Fields of one name are not of one kind."""
    try:
        kind.read(value)
    except FieldError:
        return False
    return True


def _right(kind: FieldKind, known: Known) -> Any:
    match kind:
        case Whole():
            return max(kind.minimum, min(1, kind.maximum))
        case Truth():
            return False
        case Text():
            return "x"
        case Blob():
            return _fill(kind, _ITEMS, known)
        case Choice():
            return int(next(iter(kind.names)))
        case Several():
            return (_right(kind.item, known),) * min(_ITEMS, kind.limit)
        case Shape():
            return _right_record(kind, known)
    raise AssertionError(f"nothing is right for {kind}")


def _fill(kind: Blob, count: int, known: Known) -> bytes:
    """Makes as many items as allowed from these."""
    count = min(count, kind.limit)
    if kind.item_bytes == HASH_BYTES and known.hashes:
        return b"".join((known.hashes * count)[:count])
    if kind.item_bytes == 8 and known.numbers:
        return b"".join(number.to_bytes(8, "little") for number in (known.numbers * count)[:count])
    return bytes(count * kind.item_bytes)


# ---- what is not ----


def _forge_record(shape: Shape, right: tuple[Any, ...], known: Known) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Its right fields, one of them forged, and which; then too few, and too many."""
    for at, spec in enumerate(shape.fields):
        for path, lie in _lies_about(spec.kind, right[at], known):
            yield f"{spec.name}{path}", (*right[:at], lie, *right[at + 1 :])
        yield spec.name, right[:at]
    yield "and more", (*right, *_ODD)


def _lies_about(kind: FieldKind, right: Any, known: Known) -> Iterator[tuple[str, Any]]:
    """Lies about a field, and of a row within it which part."""
    for odd in _ODD:
        yield "", odd
    match kind:
        case Whole():
            for number in _lies_about_whole(kind, known):
                yield "", number
        case Truth():
            yield "", True
            yield "", 1
        case Text():
            for line in (*_LINES, "x" * kind.limit, "x" * (kind.limit + 1), *known.names):
                yield "", line
        case Blob():
            for blob in _lies_about_blob(kind, known):
                yield "", blob
        case Choice():
            for number in sorted({int(name) for name in kind.names}):
                yield "", number
            yield "", max(int(name) for name in kind.names) + 1
        case Several():
            item = right[0] if right else _right(kind.item, known)
            yield "", (item,) * min(kind.limit, 255)
            yield "", (item,) * (kind.limit + 1)
            for path, lie in _lies_about(kind.item, item, known):
                yield path, (item, lie)
        case Shape():
            for path, row in _forge_record(kind, right, known):
                yield f".{path}", row
        case _:
            raise AssertionError(f"nobody lies about {kind}")


def _lies_about_whole(kind: Whole, known: Known) -> Iterator[int]:
    ends = {kind.minimum - 1, kind.minimum, kind.minimum + 1, kind.maximum - 1, kind.maximum, kind.maximum + 1}
    powers = {0, 1, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, U64 - 1}
    near = {number + step for number in known.numbers for step in (-1, 0, 1)}
    yield from sorted(number for number in ends | powers | near if -(2**63) <= number < U64)


def _lies_about_blob(kind: Blob, known: Known) -> Iterator[bytes]:
    """Yields blobs of a right length and of wrong ones; with values that others have, and values that do not exist."""
    for count in sorted({kind.minimum, 1, _ITEMS, _ITEMS + 1}):
        size = min(count, kind.limit) * kind.item_bytes
        yield bytes(size)
        yield b"\xff" * size
        yield _fill(kind, count, known)
    yield b"\x01" * (kind.item_bytes + 1)
    for count in (kind.limit, kind.limit + 1):
        if (size := count * kind.item_bytes) < FRAME_BYTES - 4096:
            yield b"\x5a" * size
    if kind.item_bytes == 8:
        yield b"".join(number.to_bytes(8, "little") for number in known.numbers)
        yield (U64 - 4096).to_bytes(8, "little") * _ITEMS
    if kind.item_bytes == HASH_BYTES:
        yield b"".join(known.hashes)


def fields_of(kind: type[Message]) -> Iterator[str]:
    """All fields that a message has, with those of its rows, as `Forged.what` names them."""

    def walk(shape: Shape, before: str) -> Iterator[str]:
        for spec in shape.fields:
            inner: Any = spec.kind
            while isinstance(inner, Several):
                inner = inner.item
            yield f"{before}{spec.name}"
            if isinstance(inner, Shape):
                yield from walk(inner, f"{before}{spec.name}.")

    yield from walk(Shape(kind), f"{name_of(kind)}.")

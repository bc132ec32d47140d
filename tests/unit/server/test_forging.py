"""Every field of every message is forged, whatever messages there are."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Annotated

from kvoffload.protocol import CODEC, MESSAGES, Call
from kvoffload.protocol.fields import U32, Chain, Line, Several
from kvoffload.protocol.message import ClientMessage, Message, Request
from kvoffload.protocol.shape import Shape
from tests.kit.hostile.forging import HEAD, Known, fields_of, forge_in_turn, forge_one

KNOWN = Known(numbers=(5, 2**40), hashes=(bytes(32), b"\x01" * 32), names=("red", "blue"))


def count_lies(*messages: type[Message]) -> dict[str, set[bytes]]:
    """Counts different frames by field."""
    found: dict[str, set[bytes]] = {}
    for forged in forge_in_turn(messages, KNOWN):
        found.setdefault(forged.what, set()).add(forged.pack(number=1, session=7))
    return found


def test_every_field_of_every_message_is_forged_in_turn() -> None:
    for message in MESSAGES:
        name = next(iter(forge_in_turn([message], KNOWN))).what
        wanted = [*fields_of(message), *(f"{name}{head}" for head in HEAD)]
        lies = count_lies(message)
        assert [field for field in wanted if len(lies.get(field, ())) < 10] == []


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a later version's message."""

    count: Annotated[U32, "how many"]


@dataclass(frozen=True, kw_only=True)
class Tomorrow(Request):
    """A message that there is not yet."""

    op = 63

    chain: Annotated[Chain, "of what"]
    why: Annotated[Line, "in words"]
    rows: Annotated[tuple[Row, ...], Several(Shape(Row), 3), "of it"] = ()


def test_a_new_message_is_forged_by_its_declaration() -> None:
    lies = count_lies(Tomorrow)
    assert {"tomorrow.chain", "tomorrow.why", "tomorrow.rows", "tomorrow.rows.count", "tomorrow.session"} <= set(lies)
    # A chain that is a hash too long is among them, and a row too many.
    assert max(map(len, lies["tomorrow.chain"])) > 131_072 * 32


def test_what_is_not_forged_is_right() -> None:
    """If these messages were wrong, the server would not look at forged fields."""
    for message in MESSAGES:
        if issubclass(message, ClientMessage):
            right = next(iter(forge_in_turn([message], KNOWN)))
            (channel, *_) = message.channels
            assert isinstance(CODEC.decode_call(right.pack(number=1, session=1), channel=channel), Call), message


def test_some_of_what_is_forged_is_let_in() -> None:
    """A lie that has the right form."""
    chance, read = Random(1), 0
    for _ in range(2000):
        forged = forge_one(MESSAGES, KNOWN, chance)
        read += isinstance(CODEC.decode_call(forged.pack(number=1, session=1)), Call)
    assert 100 < read < 1900

"""A protocol version that does not exist: one field more, one operation more. What our next version will be like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvoffload.protocol import MESSAGES, Channel, Codec, Done, Phase, blocks
from kvoffload.protocol.fields import U16, U64, Several, Since
from kvoffload.protocol.message import Request
from kvoffload.protocol.shape import Shape


@dataclass(frozen=True, kw_only=True)
class Acquire(blocks.Acquire):
    """As before, with a field appended."""

    priority: Annotated[U16, "who waits least", Since(2)] = 5


@dataclass(frozen=True, kw_only=True)
class LeasedSlots(blocks.LeasedSlots):
    """As before, with a field appended to a row."""

    age_s: Annotated[U64, "since the first block was saved", Since(2)] = 0


@dataclass(frozen=True, kw_only=True)
class Acquired(blocks.Acquired):
    """The message of version 1 with rows that have grown."""

    groups: Annotated[tuple[LeasedSlots, ...], Several(Shape(LeasedSlots), 64), "one for each group"] = ()


@dataclass(frozen=True, kw_only=True)
class Pin(Request):
    """A new operation."""

    op = 31
    since = 2
    needs = Phase.GREETED
    channels = (Channel.CONTROL,)
    reply = Done

    lease: Annotated[U64, "to be kept"]


_REPLACED = {blocks.Acquire: Acquire, blocks.Acquired: Acquired}
MESSAGES_TWO = (*(_REPLACED.get(message, message) for message in MESSAGES), Pin)
CODEC_TWO = Codec(MESSAGES_TWO)

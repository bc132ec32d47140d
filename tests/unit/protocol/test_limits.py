"""Limits agree with each other."""

from __future__ import annotations

import pytest

from kvoffload.protocol import MESSAGES, Acquired, Channel
from kvoffload.protocol.fields import Blob, Choice, FieldKind, Several, Text, Truth, Whole
from kvoffload.protocol.limits import ARRAY_ITEMS, FRAME_ARRAYS
from kvoffload.protocol.message import Message
from kvoffload.protocol.shape import Shape

HEADER_BYTES = 5
HEAD_BYTES = HEADER_BYTES + 4 * 9


def most_bytes(kind: FieldKind) -> int:
    """Returns the bytes of the longest value, by msgpack's longest headers."""
    match kind:
        case Whole() | Choice():
            return 9
        case Truth():
            return 1
        case Text():
            return HEADER_BYTES + kind.limit
        case Blob():
            return HEADER_BYTES + kind.item_bytes * kind.limit
        case Several():
            return HEADER_BYTES + kind.limit * most_bytes(kind.item)
        case Shape():
            return HEADER_BYTES + sum(most_bytes(field.kind) for field in kind.fields)
    raise AssertionError(f"no size for {kind}")


def most_arrays(kind: FieldKind) -> int:
    match kind:
        case Several():
            return 1 + kind.limit * most_arrays(kind.item)
        case Shape():
            return 1 + sum(most_arrays(field.kind) for field in kind.fields)
    return 0


def longest_array(kind: FieldKind) -> int:
    match kind:
        case Several():
            return max(kind.limit, longest_array(kind.item))
        case Shape():
            return max([4 + len(kind.fields), *(longest_array(field.kind) for field in kind.fields)])
    return 0


@pytest.mark.parametrize("message", MESSAGES)
def test_whatever_its_fields_allow_fits_a_frame(message: type[Message]) -> None:
    shape = Shape(message)
    assert most_arrays(shape) <= FRAME_ARRAYS
    assert longest_array(shape) <= ARRAY_ITEMS
    if message is Acquired:
        # Its groups share one request's blocks, so together they are far from what each alone may have. If they are
        # not, encoding refuses, and the client may ask for fewer blocks or shards.
        return
    limit = min(channel.limit_bytes for channel in message.channels)
    assert HEAD_BYTES + most_bytes(shape) <= limit


def test_a_lifeline_packet_is_smaller_than_any_socket_buffer() -> None:
    assert Channel.LIFELINE.limit_bytes <= 212_992

"""Any bytes become a message or a ProtocolFault, and memory stays bounded by the frame."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvoffload.protocol import CODEC, MESSAGES, ErrorCode, ProtocolFault
from kvoffload.protocol.limits import FRAME_ARRAYS, FRAME_BYTES
from kvoffload.protocol.message import Message
from kvoffload.protocol.shape import Shape
from kvoffload.units import MIB
from tests.kit.protocol.agreed import send
from tests.kit.protocol.any_bytes import ANYTHING, OPS, decode_all
from tests.kit.protocol.examples import draw_message, make_example
from tests.kit.protocol.golden import make_frame


@given(st.binary(max_size=300))
@example(b"")
@example(b"\xc7\x00\x05")
@example(b"\x94\x04\xcf")
@example(b"\xd9\x02\xed\xb0")
def test_random_bytes(frame: bytes) -> None:
    decode_all(frame)


@given(ANYTHING)
def test_random_values(value: Any) -> None:
    decode_all(msgpack.packb(value))


@given(
    st.sampled_from(OPS), st.lists(st.integers(1, 2**64 - 1), min_size=2, max_size=3), st.lists(ANYTHING, max_size=12)
)
def test_random_fields_behind_a_right_head(op: int, head: list[int], fields: list[Any]) -> None:
    decode_all(msgpack.packb([op, *head, *fields]))


@given(draw_message(MESSAGES), st.data())
def test_right_frames_with_wrong_bytes(message: Any, data: st.DataObject) -> None:
    frame = bytearray(send(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        cut = data.draw(st.integers(0, 3))
        frame[at : at + cut] = data.draw(st.binary(max_size=5))
    decode_all(bytes(frame))


@given(draw_message(MESSAGES), ANYTHING, st.data())
def test_right_frames_with_one_wrong_value(message: Any, value: Any, data: st.DataObject) -> None:
    items = msgpack.unpackb(send(message))
    items[data.draw(st.integers(0, len(items) - 1))] = value
    decode_all(msgpack.packb(items))


@pytest.mark.parametrize("message", MESSAGES)
def test_no_part_of_a_frame_is_a_message(message: type[Message]) -> None:
    frame = make_frame(make_example(Shape(message), version=1), 1)
    for end in range(len(frame)):
        assert all(isinstance(found, ProtocolFault) for found in decode_all(frame[:end]))
    assert all(isinstance(found, ProtocolFault) for found in decode_all(frame + b"\xc0"))


def fill(unit: bytes, head: bytes = b"") -> bytes:
    return (head + unit * (FRAME_BYTES // len(unit)))[:FRAME_BYTES]


def worst_frames() -> dict[str, bytes]:
    """Each asks for far more memory than it has bytes."""
    row = b"\xdc\x01\x00" + b"\xa2ab" * 256
    return {
        "array of 2^32 - 1": b"\xdd\xff\xff\xff\xff",
        "text of 2^32 - 1": b"\xdb\xff\xff\xff\xff",
        "bytes of 2^32 - 1": b"\xc6\xff\xff\xff\xff",
        "map of 2^32 - 1": b"\xdf\xff\xff\xff\xff",
        "extension of 2^32 - 1": b"\xc9\xff\xff\xff\xff\x01",
        "each array as long as the frame": b"\xdd\x00\x00\xff\xff" * 13_107,
        "each array one array": fill(b"\x91"),
        "each array the largest, with one array": fill(b"\xdc\x01\x00"),
        "each array the largest, with 255 texts and one array": fill(b"\xdc\x01\x00" + b"\xa2ab" * 255),
        "the most arrays of the most texts": fill(row, b"\xdc\x01\x00"),
        "empty maps": fill(b"\xdc\x01\x00" + b"\x80" * 256, b"\xdc\x01\x00"),
        "empty arrays": fill(b"\xdc\x01\x00" + b"\x90" * 256, b"\xdc\x01\x00"),
        "small arrays": fill(b"\xdc\x01\x00" + b"\x91\xcb" + b"\x01" * 8, b"\xdc\x01\x00"),
        "an acquire that is empty maps": fill(b"\x80", b"\x9a\x04\x01\x01\x00\x01\xdc\x01\x00"),
        "an acquire with a chain too long": b"\x96\x04\x01\x01\x00\x01\xc6\x00\x7f\xff\xe0" + bytes(0x7FFFE0),
    }


@pytest.mark.parametrize("name", worst_frames())
def test_memory_stays_bounded_by_the_frame(name: str) -> None:
    frame = worst_frames()[name]
    assert len(frame) <= FRAME_BYTES
    tracemalloc.start()
    try:
        found = CODEC.decode_call(frame)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(found, ProtocolFault)
    assert peak_bytes <= len(frame) + 16 * MIB


def test_nesting_is_bounded_by_the_number_of_arrays() -> None:
    deep: Any = []
    for _ in range(FRAME_ARRAYS):
        deep = [deep]
    fault = CODEC.decode_call(msgpack.packb(deep))
    assert isinstance(fault, ProtocolFault)
    assert (fault.code, fault.message) == (ErrorCode.TOO_LARGE, "frame: more than 512 arrays, allowed: at most 512")

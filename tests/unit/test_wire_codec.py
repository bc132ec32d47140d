"""The native core reads and writes the same as the codec in Python, byte for byte and fault for fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload import native
from kvoffload.errors import ProtocolError
from kvoffload.protocol import CODEC, MESSAGES, Acquire, Acquired, Channel, Codec, LeasedSlots, Publish, Release
from kvoffload.protocol.limits import FRAME_BYTES, MAX_BLOCKS
from kvoffload.protocol.message import ClientMessage
from kvoffload.types import AcquireOutcome
from kvoffload.wire_codec import CODEC as COMPILED
from tests.kit.protocol.agreed import agree, decode
from tests.kit.protocol.any_bytes import ANYTHING
from tests.kit.protocol.examples import draw_message

ACQUIRED = Acquired(
    outcome=AcquireOutcome.HIT,
    boundary=64,
    lease=7,
    groups=(LeasedSlots(first=0, addresses=bytes(16), digests=bytes(32)),),
)


def encode(codec: Codec, message: Any, number: int, other: int) -> bytes | str:
    """Returns a message's bytes, or what is wrong with it."""
    channel = message.channels[0]
    try:
        if isinstance(message, ClientMessage):
            return codec.encode_call(message, number=number, session=other, expires_ns=other // 2, channel=channel)
        return codec.encode_answer(message, number=number, boot_id=other, channel=channel)
    except ProtocolError as fault:
        return str(fault)


@given(draw_message(MESSAGES), st.integers(-1, 2**64), st.integers(-1, 2**64))
def test_both_write_the_same(message: Any, number: int, other: int) -> None:
    assert encode(COMPILED, message, number, other) == encode(CODEC, message, number, other)


@given(draw_message(MESSAGES), st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_both_read_the_same(message: Any, number: int, other: int) -> None:
    frame = encode(CODEC, message, number, other)
    assert isinstance(frame, bytes)
    found = decode(COMPILED, frame)
    assert found == decode(CODEC, frame)
    assert any(getattr(one, "message", None) == message for one in found)


@given(draw_message(MESSAGES), st.data())
def test_wrong_bytes_mean_the_same_to_both(message: Any, data: st.DataObject) -> None:
    frame = bytearray(encode(CODEC, message, 5, 6))
    for at in data.draw(st.lists(st.integers(0, len(frame) - 1), max_size=4)):
        frame[at] = data.draw(st.integers(0, 255))
    agree(bytes(frame))
    agree(bytes(frame[: data.draw(st.integers(0, len(frame)))]))
    agree(bytes(frame) + data.draw(st.binary(max_size=3)))


@given(draw_message(MESSAGES), ANYTHING, st.data())
def test_wrong_values_mean_the_same_to_both(message: Any, value: Any, data: st.DataObject) -> None:
    items = list(msgpack.unpackb(encode(CODEC, message, 5, 6), use_list=False))
    items[data.draw(st.integers(0, len(items) - 1))] = value
    agree(msgpack.packb(items))
    agree(msgpack.packb([*items, value]))


@pytest.mark.parametrize(
    "message",
    [
        Acquire(name_space=2**32, chain=b""),
        Acquire(name_space=True, chain=b""),
        Acquire(name_space=1, chain=bytes(33)),
        Acquire(name_space=1, chain=bytearray(32)),  # type: ignore[arg-type]
        Acquire(name_space=1, chain=bytes(32 * (MAX_BLOCKS + 1))),
        Acquire(name_space=1, chain=b"", alignment=0),
        Acquire(name_space=1, chain=b"", shards=[1]),  # type: ignore[arg-type]
        Acquire(name_space=1, chain=b"", shards=(0,) * 65),
        Acquire(name_space=1, chain=b"", shards=(2**16,)),
        Acquire(name_space=-1, chain=b""),
        Acquire(name_space=1.0, chain=b""),  # type: ignore[arg-type]
        Release(leases=None),  # type: ignore[arg-type]
        replace(ACQUIRED, outcome=0),  # type: ignore[arg-type]
        replace(ACQUIRED, groups=(LeasedSlots(first=0, addresses=bytes(16), digests=bytes(24)),)),
        replace(ACQUIRED, groups=(ACQUIRED,)),  # type: ignore[arg-type]
        replace(ACQUIRED, groups=ACQUIRED.groups * 65),
        replace(
            ACQUIRED, groups=(LeasedSlots(first=0, addresses=bytes(8 * MAX_BLOCKS)),) * (FRAME_BYTES // MAX_BLOCKS)
        ),
        Publish(name_space=1, group=0, shard=0, tickets=bytes(8), hashes=bytes(64)),
        Publish(name_space=1, group=0, shard=0, tickets=bytes(8), hashes=bytes(32), parents=bytes(64)),
    ],
)
def test_neither_writes_what_its_reader_would_refuse(message: Any) -> None:
    line = encode(CODEC, message, 1, 2)
    assert isinstance(line, str)
    assert encode(COMPILED, message, 1, 2) == line


@pytest.mark.parametrize("count", [0, 1, 7, 8, 31, 32, 255, 256, 2047, 2048, 8192, MAX_BLOCKS])
def test_every_length_of_a_header(count: int) -> None:
    for message in (Acquire(name_space=count, chain=bytes(32 * count)), replace(ACQUIRED, boundary=count)):
        frame = encode(COMPILED, message, 1 << 40, count)
        assert frame == encode(CODEC, message, 1 << 40, count)
        assert decode(COMPILED, frame) == decode(CODEC, frame)


def test_what_is_asked_for_in_every_step_is_plain() -> None:
    known: list[bool] = []

    class Noted:
        """It notes whether it knows what it is asked for."""

        def __init__(self, minima: tuple[int, ...], limit_bytes: int) -> None:
            self._frames = native.PlainFrames(minima, limit_bytes)
            self.add = self._frames.add

        def write(self, *asked: Any) -> bytes | None:
            frame = self._frames.write(*asked)
            known.append(frame is not None)
            return frame

        def read(self, frame: Any) -> Any:
            found = self._frames.read(frame)
            known.append(found is not None)
            return found

    compiled = Codec(MESSAGES, make_plain=Noted)
    plain = native.PlainFrames((0, 0), FRAME_BYTES)
    for call in (Acquire(name_space=1, chain=bytes(64)), Release(leases=bytes(8))):
        numbers = {"number": 1, "session": 2, "expires_ns": 3}
        frame = compiled.encode_call(call, **numbers, channel=Channel.EXPRESS)
        assert compiled.decode_call(frame, channel=Channel.EXPRESS) == (call, 1, 2, 3)
        assert plain.read(frame) is None
    frame = compiled.encode_answer(ACQUIRED, number=1, boot_id=2, channel=Channel.EXPRESS)
    assert compiled.decode_answer(frame, channel=Channel.EXPRESS) == (ACQUIRED, 1, 2)
    assert plain.read(frame) is None
    assert known == [True] * 6

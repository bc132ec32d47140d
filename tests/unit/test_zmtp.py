"""ZMTP as a server speaks it: what a client of ZeroMQ sends, in whatever pieces, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.errors import PacketError
from kvoffload.zmtp import GREETING, MAX_PARTS, ZmtpReader, pack_command, pack_head

READY = pack_command(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER")
OPENING = GREETING + READY


def pack(frame: bytes, flags: int = 0) -> bytes:
    head = pack_head(len(frame))
    return bytes((head[0] | flags,)) + head[1:] + frame


def take_all(reader: ZmtpReader) -> list[bytes]:
    frames = []
    while (frame := reader.take()) is not None:
        frames.append(frame)
    return frames


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_frames_come_whole_whatever_the_pieces(frames: list[bytes], pieces: list[int]) -> None:
    data = memoryview(OPENING + b"".join(map(pack, frames)))
    reader = ZmtpReader(frame_bytes=300)
    came, at = [], 0
    while data:
        reader.feed(data[: pieces[at % len(pieces)]])
        data = data[pieces[at % len(pieces)] :]
        at += 1
        came += take_all(reader)
    assert came == frames
    assert len(reader) == 0


def test_the_other_end_is_told_who_we_are() -> None:
    reader = ZmtpReader(frame_bytes=300)
    reader.feed(memoryview(OPENING))
    assert reader.take() is None
    assert reader.take_reply() == pack_command(
        b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00"
    )
    assert reader.take_reply() == b""


def test_who_asks_whether_we_are_there_is_told() -> None:
    reader = ZmtpReader(frame_bytes=300)
    reader.feed(memoryview(OPENING + pack_command(b"\x04PING\x00\x10context") + pack(b"x")))
    assert reader.take() == b"x"
    assert reader.take_reply().endswith(pack_command(b"\x04PONGcontext"))


def test_a_message_of_several_parts_has_no_bytes() -> None:
    reader = ZmtpReader(frame_bytes=300)
    reader.feed(memoryview(OPENING + pack(b"one", 1) + pack(b"two", 1) + pack(b"three") + pack(b"next")))
    assert take_all(reader) == [b"", b"next"]


def test_the_bound_counts_from_the_next_frame_on() -> None:
    reader = ZmtpReader(frame_bytes=3)
    reader.feed(memoryview(OPENING + pack(b"abc") + pack(bytes(500))))
    assert reader.take() == b"abc"
    reader.frame_bytes = 500
    assert reader.take() == bytes(500)


@pytest.mark.parametrize(
    "wrong",
    [
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(8) + b"\x7e",
        b"\xff" + bytes(8) + b"\x7f\x01",
        GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32),
        GREETING + pack(b"early"),
        OPENING + pack(bytes(301)),
        OPENING + b"\x02" + b"\xff" * 8,
        OPENING + b"\x08\x00",
        OPENING + pack_command(bytes(513)),
        OPENING + pack(b"", 1) * MAX_PARTS,
        OPENING + pack_command(b"\x04PING\x00\x10") * MAX_PARTS,
    ],
)
def test_what_it_may_not_send_is_refused(wrong: bytes) -> None:
    reader = ZmtpReader(frame_bytes=300)
    reader.feed(memoryview(wrong))
    with pytest.raises(PacketError):
        take_all(reader)


@given(st.binary(max_size=400), st.booleans())
def test_nothing_else_happens_whatever_comes(data: bytes, is_open: bool) -> None:
    reader = ZmtpReader(frame_bytes=300)
    reader.feed(memoryview(OPENING * is_open + data))
    try:
        take_all(reader)
    except PacketError:
        return
    assert len(reader) <= 400


def test_parts_that_come_one_by_one_are_bounded_too() -> None:
    reader = ZmtpReader(frame_bytes=300)
    reader.feed(memoryview(OPENING))
    for _ in range(MAX_PARTS - 1):
        reader.feed(memoryview(pack(b"", 1)))
        assert reader.take() is None
    reader.feed(memoryview(pack(b"", 1)))
    with pytest.raises(PacketError):
        reader.take()

"""The echo has the bytes of an acquire and of its answer."""

from __future__ import annotations

from pathlib import Path

import msgpack

from kvoffload.bench.child import Child
from kvoffload.bench.echo import LARGE, NUMBER, EchoClient
from kvoffload.protocol import CODEC, Acquire, Acquired, Channel, LeasedSlots
from kvoffload.types import AcquireOutcome

BLOCKS = 64


def test_an_echo_is_as_long_as_what_it_stands_for(tmp_path: Path) -> None:
    request = CODEC.encode_call(
        Acquire(name_space=1, chain=bytes(32 * BLOCKS), limit=16 * BLOCKS),
        number=NUMBER,
        session=LARGE,
        expires_ns=LARGE,
        channel=Channel.EXPRESS,
    )
    slots = LeasedSlots(first=0, addresses=bytes(8 * BLOCKS))
    hit = Acquired(outcome=AcquireOutcome.HIT, boundary=16 * BLOCKS, lease=LARGE, groups=(slots,))
    reply = CODEC.encode_answer(hit, number=NUMBER, boot_id=LARGE, channel=Channel.EXPRESS)
    with Child("kvoffload.bench.echo", tmp_path / "e"), EchoClient(tmp_path / "e", BLOCKS) as echo:
        assert msgpack.packb(echo.request) == request
        assert msgpack.packb(echo.call()) == reply

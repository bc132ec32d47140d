"""Two codecs that agree."""

from __future__ import annotations

from typing import Any

from kvoffload.protocol import (
    CODEC,
    Channel,
    ClientMessage,
    Codec,
)
from kvoffload.wire_codec import CODEC as COMPILED


def decode(codec: Codec, frame: Any) -> list[Any]:
    return [
        decode(frame, channel=channel) for channel in Channel for decode in (codec.decode_call, codec.decode_answer)
    ]


def agree(frame: Any) -> None:
    """Checks that both agree on what a frame is: values and their types."""
    assert repr(decode(COMPILED, frame)) == repr(decode(CODEC, frame))


def send(message: Any, codec: Any = CODEC) -> bytes:
    channel = message.channels[0]
    if isinstance(message, ClientMessage):
        return codec.encode_call(message, number=7, session=8, expires_ns=9, channel=channel)
    return codec.encode_answer(message, number=7, boot_id=8, channel=channel)

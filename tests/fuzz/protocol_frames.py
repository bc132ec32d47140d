"""Frames of all channels, as every reader reads them: the codec in Python, and the native one, which must agree."""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload.protocol import MESSAGES
from kvoffload.protocol.shape import Shape
from tests.kit.protocol.agreed import agree
from tests.kit.protocol.any_bytes import decode_all
from tests.kit.protocol.examples import make_example
from tests.kit.protocol.golden import make_frame


def make_seeds() -> Iterator[bytes]:
    for message in MESSAGES:
        yield make_frame(make_example(Shape(message), version=1), 1)


def run(data: bytes) -> None:
    decode_all(data)
    agree(data)

"""Parts of inputs that have more than one part."""

from __future__ import annotations

import random
from collections.abc import Sequence

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63, 2**64 - 1)
_LARGEST = 1 << 14


class Input:
    """An input, from its first byte on. Behind its end are zeros, and no bytes."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether there are more bytes."""
        return self._at < len(self._data)

    def take(self, size: int) -> bytes:
        taken = self._data[self._at : self._at + size]
        self._at += len(taken)
        return taken

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def number(self, size: int = 1) -> int:
        return int.from_bytes(self.take(size), "little")

    def part(self) -> bytes:
        """Behind its length, in two bytes."""
        return self.take(self.number(2))


def check_line(fault: Exception) -> None:
    """Checks that the message of a fault is one line."""
    assert "\n" not in str(fault), str(fault)


def pack_part(data: bytes) -> bytes:
    return len(data).to_bytes(2, "little") + data


def mutate(seeds: Sequence[bytes], choice: random.Random) -> bytes:
    """One of these, changed in some places: what a test that has no fuzzer runs."""
    data = bytearray(choice.choice(seeds))
    for _ in range(choice.randint(1, 6)):
        at = choice.randint(0, len(data))
        other = choice.choice((data, choice.choice(seeds)))
        begin = choice.randint(0, len(other))
        match choice.randrange(5):
            case 0:
                data[at:at] = other[begin : begin + choice.randint(1, 64)]
            case 1:
                del data[at : at + choice.randint(1, 32)]
            case 2:
                size = choice.choice((1, 2, 4, 8))
                data[at : at + size] = (choice.choice(_NUMBERS) % 256**size).to_bytes(size, "little")
            case 3:
                data[at : at + 4] = choice.randbytes(choice.randint(1, 8))
            case _ if at < len(data):
                data[at] ^= 1 << choice.randrange(8)
    return bytes(data[:_LARGEST])

"""Bytes of an allocation that are not pages: declared padding, and exclusions with a name."""

from __future__ import annotations

from dataclasses import dataclass

from kvoffload.errors import StrideError


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """[base, base + length) of an allocation, `count` times every `stride` bytes."""

    allocation: str
    base: int
    length: int
    stride: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.base < 0 or self.length < 1 or self.count < 1 or (self.count > 1 and self.stride < self.length):
            raise StrideError(
                f"{self.label}: base {self.base}, length {self.length}, {self.count} times every {self.stride} bytes",
                remedy="lengths and counts are positive, bases not negative, a stride at least the length",
                allocation=self.allocation,
            )

    @property
    def label(self) -> str:
        return f"bytes {self.base}.. of {self.allocation}"


@dataclass(frozen=True, kw_only=True)
class Padding(ByteRange):
    """Bytes that an engine reserves and never uses. The last repetition may be cut off by the end of the allocation.

    `group`: the group in whose blocks the padding lies. Groups that overlay it may have pages there. Empty: of no
    group.
    """

    group: str = ""

    @property
    def label(self) -> str:
        return f"padding of group {self.group}" if self.group else "padding"


@dataclass(frozen=True, kw_only=True)
class Exclusion(ByteRange):
    """Bytes that are no KV cache of a described layer. `name` says what they are."""

    name: str

    @property
    def label(self) -> str:
        return f"exclusion {self.name}"

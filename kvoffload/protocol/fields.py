"""The kinds of fields: each checks values in both directions, and says for the documents what it allows.

A field's annotation is its whole declaration: `chain: Annotated[Hashes, "what it is for"]`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Any, Protocol, TypeAlias

from kvoffload.protocol import limits
from kvoffload.protocol.faults import ErrorCode, FieldError
from kvoffload.types import HASH_BYTES

U64_MAX = 2**64 - 1
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


Plan: TypeAlias = tuple[Any, ...]


class FieldKind(Protocol):
    """`read` makes a value of what msgpack found, `lower` the reverse. Both raise FieldError, and nothing else."""

    def read(self, value: object) -> Any: ...

    def lower(self, value: object) -> Any: ...

    def plan(self) -> Plan | None:
        """The declaration as plain data, to be compiled; None: only this class knows how."""
        ...

    def describe(self) -> str: ...


@dataclass(frozen=True)
class Whole:
    """A whole number. Neither True nor 1.0 is one."""

    maximum: int
    minimum: int = 0

    def read(self, value: object) -> int:
        if type(value) is int and self.minimum <= value <= self.maximum:
            return value
        found = str(value) if type(value) is int else _type_name(value)
        raise FieldError(found, self.describe())

    lower = read

    def plan(self) -> Plan:
        return "whole", self.minimum, self.maximum

    def describe(self) -> str:
        power = (self.maximum + 1).bit_length() - 1
        exact = self.maximum + 1 == 1 << power
        return f"{self.minimum} to {f'2^{power} - 1' if exact and power > 8 else self.maximum}"


@dataclass(frozen=True)
class Truth:
    """True or false."""

    def read(self, value: object) -> bool:
        if value is True or value is False:
            return value
        raise FieldError(_type_name(value), self.describe())

    lower = read

    def plan(self) -> Plan:
        return ("truth",)

    def describe(self) -> str:
        return "true or false"


@dataclass(frozen=True)
class Text:
    """One line of UTF-8: it goes into logs."""

    limit: int

    def read(self, value: object) -> str:
        if type(value) is not str:
            raise FieldError(_type_name(value), self.describe())
        # A character has at least one byte; this bounds the encoding below.
        if len(value) > self.limit or _utf8_bytes(value) > self.limit:
            raise FieldError(f"{len(value)} characters", self.describe(), ErrorCode.TOO_LARGE)
        if _CONTROL.search(value):
            raise FieldError("text with control characters", self.describe())
        return value

    lower = read

    def plan(self) -> None:
        return None

    def describe(self) -> str:
        return f"one line of text, at most {self.limit} bytes"


@dataclass(frozen=True)
class Blob:
    """Values of one size, one behind the other, in one byte string."""

    noun: str
    item_bytes: int
    limit: int
    minimum: int = 0

    def read(self, value: object) -> bytes:
        if type(value) is not bytes:
            raise FieldError(_type_name(value), self.describe())
        count, rest = divmod(len(value), self.item_bytes)
        if count > self.limit:
            raise FieldError(f"{len(value)} bytes", self.describe(), ErrorCode.TOO_LARGE)
        if rest or count < self.minimum:
            raise FieldError(f"{len(value)} bytes", self.describe())
        return value

    lower = read

    def plan(self) -> Plan:
        return "blob", self.item_bytes, self.minimum, self.limit

    def describe(self) -> str:
        if self.limit == 1:
            return f"{self.noun} of {self.item_bytes} bytes{'' if self.minimum else ', or none'}"
        return f"{self.noun} of {self.item_bytes} bytes each, {self.minimum} to {self.limit}"


@dataclass(frozen=True)
class Choice:
    """A number with a name. One that a later version adds is sent to peers of that version only."""

    names: type[IntEnum]

    @cached_property
    def _by_number(self) -> dict[int, IntEnum]:
        return {int(name): name for name in self.names}

    def read(self, value: object) -> IntEnum:
        if type(value) is int:
            name = self._by_number.get(value)
            if name is not None:
                return name
            raise FieldError(str(value), self.describe())
        raise FieldError(_type_name(value), self.describe())

    def lower(self, value: object) -> int:
        if isinstance(value, self.names):
            return int(value)
        raise FieldError(_type_name(value), self.describe())

    def plan(self) -> Plan:
        return "choice", self.names, self._by_number

    def describe(self) -> str:
        return ", ".join(f"{name.value} {name.name}" for name in self.names)


@dataclass(frozen=True)
class Several:
    """A short list of one kind. Long ones are blobs."""

    item: FieldKind
    limit: int

    def read(self, value: object) -> tuple[Any, ...]:
        return self._each(value, self.item.read)

    def lower(self, value: object) -> tuple[Any, ...]:
        return self._each(value, self.item.lower)

    def _each(self, value: object, convert: Any) -> tuple[Any, ...]:
        if type(value) is not tuple:
            raise FieldError(_type_name(value), self.describe())
        if not value:
            return value
        if len(value) > self.limit:
            raise FieldError(f"{len(value)} items", self.describe(), ErrorCode.TOO_LARGE)
        done = []
        try:
            for item in value:
                done.append(convert(item))
        except FieldError as fault:
            fault.path = f"[{len(done)}]{fault.path}"
            raise
        return tuple(done)

    def plan(self) -> Plan | None:
        item = self.item.plan()
        return None if item is None else ("several", item, self.limit)

    def describe(self) -> str:
        return f"at most {self.limit} of: {self.item.describe()}"


@dataclass(frozen=True)
class AsMany:
    """This blob has as many values as field `of` of the same message: exactly, or none, or a multiple."""

    of: str
    or_none: bool = False
    or_multiple: bool = False

    def check(self, count: int, wanted: int) -> None:
        if count == wanted or (self.or_none and not count):
            return
        if self.or_multiple and (not count or (wanted and not count % wanted)):
            return
        raise FieldError(f"{count} values beside {wanted} of {self.of}", self.describe())

    def describe(self) -> str:
        if self.or_multiple:
            return f"a whole multiple of `{self.of}`, or none"
        return f"as many as `{self.of}`{', or none' if self.or_none else ''}"


@dataclass(frozen=True)
class Since:
    """The protocol version that appended this field. Versions before end at the field before."""

    version: int


def _type_name(value: object) -> str:
    return "nothing" if value is None else type(value).__name__


def _utf8_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        raise FieldError("text with lone surrogates", "UTF-8") from None


U16: TypeAlias = Annotated[int, Whole(2**16 - 1)]
U32: TypeAlias = Annotated[int, Whole(2**32 - 1)]
U64: TypeAlias = Annotated[int, Whole(U64_MAX)]
Flag: TypeAlias = Annotated[bool, Truth()]
Name: TypeAlias = Annotated[str, Text(limits.NAME_BYTES)]
Line: TypeAlias = Annotated[str, Text(limits.LINE_BYTES)]
Names: TypeAlias = Annotated[tuple[str, ...], Several(Text(limits.NAME_BYTES), limits.MAX_CAPABILITIES)]
Digest: TypeAlias = Annotated[bytes, Blob("digest", HASH_BYTES, 1, minimum=1)]
OptionalDigest: TypeAlias = Annotated[bytes, Blob("digest", HASH_BYTES, 1)]
Chain: TypeAlias = Annotated[bytes, Blob("hashes", HASH_BYTES, limits.MAX_BLOCKS)]
Hashes: TypeAlias = Annotated[bytes, Blob("hashes", HASH_BYTES, limits.MAX_BATCH)]
Numbers: TypeAlias = Annotated[bytes, Blob("little-endian u64", 8, limits.MAX_BATCH)]

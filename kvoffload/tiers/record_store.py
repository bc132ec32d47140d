"""What a remote tier asks of the client library of somebody else's store: values by key, in batches, by calls that
wait."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvoffload.tiers.base import Addresses, Digests, RecordBatch, RecordNames

_SMALL_BYTES = 256 << 10
_SAID_LETTERS = 300

Key = bytes
Value = bytes | bytearray | memoryview


class StoreFaultError(Exception):
    """The store cannot be asked now: it is gone, hangs, refuses this user, or does not speak as it should. One line."""


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """What a store says of itself; 0 for what it does not say."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    values: int = 0


class RecordStore(Protocol):
    """One connection, of one thread. No call waits longer than the terms it was made with; StoreFaultError, after which
    only `close` may be called."""

    def put(self, keys: Sequence[Key], values: Sequence[Sequence[Value]]) -> list[bool]:
        """Each value in its parts. False: it takes no more, or not this one."""
        ...

    def get(self, keys: Sequence[Key], limit_bytes: int) -> list[memoryview | None]:
        """Of a value that is longer than that, its beginning."""
        ...

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        """Says what is there. `is_use`: it is to stay as long as if it had been put now."""
        ...

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Removes records, and says of each whether it was there."""
        ...

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        """The first bytes of some values, and where to go on; 0 at the end. Some may come twice."""
        ...

    def probe(self) -> StoreFacts:
        """Says whether it can be asked."""
        ...

    def close(self) -> None: ...


def one_line(said: str) -> str:
    """What a store has said, whatever that is, as a log can have it: one line of letters that can be printed."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in said).split())[:_SAID_LETTERS]


def view_slot(address: int, size_bytes: int) -> memoryview:
    """Returns a slot's bytes; its owner says for how long they are valid."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def fill_slot(address: int, data: memoryview) -> None:
    """A small record is copied while nothing else of Python runs: to let go and to wait for its turn costs more."""
    if len(data) <= _SMALL_BYTES:
        view_slot(address, len(data))[:] = data
    else:
        ctypes.memmove(address, np.frombuffer(data, np.uint8).ctypes.data, len(data))


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundRecords:
    """What a get has ended with: outcomes and digests, one a record; `parents` where the store knows them."""

    outcomes: npt.NDArray[np.uint8]
    digests: Digests
    parents: bytes = b""


class SlotStore(ABC):
    """A store that moves records of itself, between its connection and slots. Otherwise as a RecordStore."""

    @abstractmethod
    def put_slots(self, batch: RecordBatch) -> npt.NDArray[np.uint8]:
        """Puts records from slots, and returns their outcomes. What is there already is not sent; a record without
        its digest is not stored."""

    @abstractmethod
    def get_slots(self, names: RecordNames, slots: Addresses, *, record_bytes: int) -> FoundRecords:
        """Brings records to slots. What is found is verified."""

    @abstractmethod
    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]: ...

    @abstractmethod
    def remove(self, keys: Sequence[Key]) -> list[bool]: ...

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        """Refuses: a store need not list what it has."""
        raise StoreFaultError("it does not list what it has")

    @abstractmethod
    def probe(self) -> StoreFacts: ...

    @abstractmethod
    def interrupt(self) -> None:
        """Interrupts the store, from any thread: what is under way fails at once; when it has, no slot is touched any
        more."""

    @abstractmethod
    def close(self) -> None: ...

"""The interface of an external store to its remote tier: values by key, in batches, by calls that wait."""

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
    """A store's own figures; 0 for those that it does not report."""

    capacity_bytes: int = 0
    used_bytes: int = 0
    values: int = 0


class RecordStore(Protocol):
    """One connection, for one thread. No call waits longer than its settings allow. StoreFaultError: after it,
    only `close` may be called."""

    def put(self, keys: Sequence[Key], values: Sequence[Sequence[Value]]) -> list[bool]:
        """Stores values, each given in parts. False: the store takes no more, or not this one."""
        ...

    def get(self, keys: Sequence[Key], limit_bytes: int) -> list[memoryview | None]:
        """Reads values; of one that is longer than `limit_bytes`, its beginning. They are valid until the next call."""
        ...

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        """Returns which values are there. `is_use`: they should stay as long as if they had been put now."""
        ...

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        """Removes records, and returns for each whether it was there."""
        ...

    def scan(self, cursor: int, head_bytes: int) -> tuple[int, list[bytes]]:
        """Returns where to go on, 0 at the end, and the first bytes of some values. Some may come twice."""
        ...

    def probe(self) -> StoreFacts:
        """Checks that the store can be asked, and returns its figures."""
        ...

    def close(self) -> None: ...


def one_line(said: str) -> str:
    """Makes a store's message fit for a log, whatever it is: one line of letters that can be printed."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in said).split())[:_SAID_LETTERS]


def view_slot(address: int, size_bytes: int) -> memoryview:
    """Returns a slot's bytes; its owner says for how long they are valid."""
    return memoryview((ctypes.c_char * size_bytes).from_address(address)).cast("B")


def fill_slot(address: int, data: memoryview) -> None:
    """Copies a record. A small one is copied without releasing the GIL: to wait for it again would cost more."""
    if len(data) <= _SMALL_BYTES:
        view_slot(address, len(data))[:] = data
    else:
        ctypes.memmove(address, np.frombuffer(data, np.uint8).ctypes.data, len(data))


@dataclass(frozen=True, kw_only=True, eq=False)
class FoundRecords:
    """The result of a get: outcomes and digests, one a record; `parents` where the store knows them."""

    outcomes: npt.NDArray[np.uint8]
    digests: Digests
    parents: bytes = b""


class SlotStore(ABC):
    """A store that moves records itself, between its connection and slots. Otherwise like a RecordStore."""

    seals_records = False
    """Whether it seals and opens records with the keys of its tier's coder, where that has some."""

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

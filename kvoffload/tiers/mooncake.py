"""Mooncake Store as a record store, through its own Python client.

The client runs in a process of its own, one for each connection: setting one up without a master keeps the whole
interpreter waiting. Records pass through memory that is shared with that process and registered with the client, so a
slot is never what a late call reads or writes.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from kvoffload.config.mooncake_address import MooncakeAddress, parse_mooncake_address
from kvoffload.tiers import store_child
from kvoffload.tiers.base import Addresses, RecordBatch, RecordNames, RecordOutcome
from kvoffload.tiers.envelope import (
    HEAD_BYTES,
    OpenValue,
    RecordHead,
    Verdict,
    check_record,
    digest_of,
    list_names,
    most_value_bytes,
    open_value,
    pack_value,
)
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import FoundRecords, Key, SlotStore, StoreFacts, StoreFaultError, fill_slot, view_slot
from kvoffload.tiers.remote import RemotePlace, RemoteTier, RemoteTierSettings
from kvoffload.tiers.store_process import StoreProcess
from kvoffload.types import HASH_BYTES
from kvoffload.units import GIB

if TYPE_CHECKING:
    from kvoffload.config.settings import Settings

CLIENTS = 2
"""The most connections of one tier. Each is a process."""
LIBRARY = store_child.Library(module="kvoffload.tiers.mooncake_child", data_bytes=4 * GIB, data_per_shared=0)
PREFIX = "kvoffload:1:"
"""Prefix of every key; the number is that of the envelope's layout."""
_ROW = 64
"""Records lie in shared memory at multiples of it."""
_PROBED = PREFIX + "probe"
_NOT_THERE = -704
_MASTER_LOST = -900
"""From here down, Mooncake's codes are about the master; above it, about one object and those who have it."""


@dataclass(frozen=True, kw_only=True)
class MooncakeSettings(RemotePlace):
    """The settings with which a tier reaches a Mooncake store."""

    address: MooncakeAddress
    protocol: str = "tcp"
    device: str = ""
    """Name of the RDMA device; empty for all."""
    metadata: str = field(default="P2PHANDSHAKE", repr=False)
    """Address of the service where clients find each other, possibly with a password; P2PHANDSHAKE: they ask each
    other."""
    host: str = "127.0.0.1"
    """Host name by which the stores reach this machine."""
    call_timeout_s: float = 1.0
    connections: int = CLIENTS
    compress: Coding = Coding.OFF

    @classmethod
    def from_settings(cls, settings: Settings, where: str) -> Self:
        """Makes the settings for the store with this master."""
        return cls(
            address=parse_mooncake_address(where),
            protocol=settings.mooncake_protocol,
            device=settings.mooncake_device,
            metadata=settings.mooncake_metadata,
            host=settings.mooncake_host,
            call_timeout_s=settings.remote_timeout,
            connections=min(settings.remote_connections, CLIENTS),
            compress=Coding(settings.remote_compress),
        )

    def describe(self) -> str:
        """Describes the store in a few words."""
        return f"{self.address} over {self.protocol}"

    def open_tier(self) -> RemoteTier:
        """Opens the tier and starts its threads; the master need not be there."""
        coder = RecordCoder(self.compress)
        return RemoteTier(
            RemoteTierSettings(
                place=str(self.address),
                open_store=partial(self.open_store, coder),
                connections=self.connections,
                first_probe_s=0.5,
                coder=coder,
            )
        )

    def find_remedy(self, reason: str) -> str:
        return f"on {self.address.host}: mooncake_master --rpc_port={self.address.port}"

    def open_store(self, coder: RecordCoder | None = None) -> MooncakeStore:
        """Opens a store, whose process is started. StoreFaultError: it cannot be. `coder`: what stores share."""
        return MooncakeStore(self, coder or RecordCoder(self.compress))


class MooncakeStore(SlotStore):
    """A store in Mooncake. It belongs to one thread, except for `interrupt`."""

    seals_records = True

    def __init__(self, settings: MooncakeSettings, coder: RecordCoder) -> None:
        """Starts a process. StoreFaultError: it does not begin."""
        self._settings = settings
        self._coder = coder
        self._is_interrupted = False
        try:
            # A client that is set up without a master waits for it for ever.
            socket.create_connection((settings.address.host, settings.address.port), settings.call_timeout_s).close()
        except OSError as fault:
            raise StoreFaultError(f"no master: {' '.join(str(fault).split())}") from fault
        self._process = StoreProcess(LIBRARY, "Mooncake's client")
        try:
            words = (settings.host, settings.metadata, settings.protocol, settings.device, settings.address.endpoint)
            if code := self._process.ask(store_child.START_S, "setup", *words):
                raise StoreFaultError(f"Mooncake's client cannot be set up: its code is {code}")
        except StoreFaultError:
            self.close()
            raise

    def put_slots(self, batch: RecordBatch) -> npt.NDArray[np.uint8]:
        wanted, record_bytes = list(list_names(batch.names)), batch.record_bytes
        outcomes = np.full(len(wanted), RecordOutcome.WRITTEN, np.uint8)
        there = self.look([name.key for name in wanted], is_use=True)
        rows, step = self._take(len(wanted), record_bytes)
        sent: dict[int, int] = {}
        for at, name in enumerate(wanted):
            if there[at]:
                continue
            if self._is_interrupted:
                raise StoreFaultError("no request waits for it any more")
            data = rows[at, HEAD_BYTES : HEAD_BYTES + record_bytes]
            fill_slot(data.ctypes.data, view_slot(int(batch.slots[at]), record_bytes))
            digest = digest_of(data.data, name)
            if digest != int(batch.digests[at]):
                outcomes[at] = RecordOutcome.DAMAGED
                continue
            coded, seal_keys = self._coder.encode(name.group, data.data), self._coder.keys
            head, stored = pack_value(name, data.data, digest, batch.parent(at), coded=coded, keys=seal_keys)
            sent[at] = HEAD_BYTES + len(stored)
            rows[at, :HEAD_BYTES] = np.frombuffer(head, np.uint8)
            if coded is not None or seal_keys is not None:
                rows[at, HEAD_BYTES : sent[at]] = np.frombuffer(stored, np.uint8)
        keys, offsets, sizes = [_name(wanted[at].key) for at in sent], [at * step for at in sent], list(sent.values())
        with self._coder.sending():
            codes = self._ask_each("put", keys, offsets, sizes)
            self._coder.told_sent(sum(sizes))
        for at, code in zip(sent, codes, strict=True):
            if code:
                outcomes[at] = RecordOutcome.FAILED
        return outcomes

    def get_slots(self, names: RecordNames, slots: Addresses, *, record_bytes: int) -> FoundRecords:
        """A record whose lease was over before it had come is a miss, like one whose store does not answer."""
        wanted = list(list_names(names))
        outcomes = np.full(len(wanted), RecordOutcome.MISSING, np.uint8)
        digests = np.zeros(len(wanted), np.uint64)
        parents = [bytes(HASH_BYTES)] * len(wanted)
        rows, step = self._take(len(wanted), record_bytes)
        keys, offsets = [_name(name.key) for name in wanted], [at * step for at in range(len(wanted))]
        seal_keys = self._coder.keys
        for at, size in enumerate(self._ask_each("get", keys, offsets, most_value_bytes(record_bytes, seal_keys))):
            if size <= 0:
                continue
            value, slot = rows[at, :size].data, view_slot(int(slots[at]), record_bytes)
            head: RecordHead | Verdict
            if size == HEAD_BYTES + record_bytes and seal_keys is None:
                # Verifies the copy in the slot: a late transfer may still write to shared memory.
                fill_slot(int(slots[at]), value[HEAD_BYTES:])
                head = check_record(bytes(value[:HEAD_BYTES]), slot, wanted[at])
                self._coder.told_read(record_bytes)
            else:
                begun_s = time.perf_counter()
                # A copy, so that nothing changes while it is decoded.
                opened = open_value(memoryview(bytes(value)), wanted[at], record_bytes, room=slot, keys=seal_keys)
                head = opened.head if isinstance(opened, OpenValue) else opened
                if isinstance(opened, OpenValue):
                    decoding_s = time.perf_counter() - begun_s if opened.head.coded_bytes else None
                    self._coder.told_read(record_bytes, decoding_s=decoding_s)
            if isinstance(head, RecordHead):
                outcomes[at], digests[at], parents[at] = RecordOutcome.FOUND, head.digest, head.parent
            elif head is Verdict.DAMAGED:
                outcomes[at] = RecordOutcome.DAMAGED
        return FoundRecords(outcomes=outcomes, digests=digests, parents=b"".join(parents))

    def look(self, keys: Sequence[Key], *, is_use: bool = False) -> list[bool]:
        """Returns what is there. Each look is a use: a key that is looked at has a lease for a while."""
        return [code == 1 for code in self._ask_each("look", [_name(key) for key in keys])]

    def remove(self, keys: Sequence[Key]) -> list[bool]:
        codes = self._ask_each("remove", [_name(key) for key in keys])
        if other := set(codes) - {0, _NOT_THERE}:
            raise StoreFaultError(f"it could not remove all that it was told to: Mooncake's code is {min(other)}")
        return [code == 0 for code in codes]

    def probe(self) -> StoreFacts:
        """The client says nothing of its stores."""
        self._ask_each("look", [_PROBED])
        return StoreFacts()

    def interrupt(self) -> None:
        self._is_interrupted = True
        self._process.interrupt()

    def close(self) -> None:
        self._process.close()

    # ---- inside ----

    def _take(self, count: int, record_bytes: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Shared memory for so many records with their heads, one a row; and how far rows are apart."""
        step = -(-most_value_bytes(record_bytes, self._coder.keys) // _ROW) * _ROW
        memory = self._process.take(self._settings.call_timeout_s, count * step)
        return memory.reshape(count, step), step

    def _ask_each(self, verb: str, keys: list[str], *rest: Any) -> list[int]:
        """A code a key. StoreFaultError: the master does not answer."""
        codes: list[int] = self._process.ask_each(self._settings.call_timeout_s, verb, keys, *rest)
        lost = [code for code in codes if code <= _MASTER_LOST]
        if lost:
            raise StoreFaultError(f"the master does not answer: Mooncake's code is {lost[0]}")
        return codes


def _name(key: Key) -> str:
    return PREFIX + key.hex()

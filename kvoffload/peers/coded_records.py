"""Records from slots to a link, and from a link to slots, as they are or coded."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvoffload import native
from kvoffload.peers.requests import CODE
from kvoffload.tiers.base import Addresses, Digests, RecordNames
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.record_store import view_slot

CODING_S: Final = 0.25
"""How long one request's records are coded; those that are left by then are sent as they are."""
_LENGTH = struct.Struct("<I")


def send_records(
    link: native.RecordLink,
    slots: Addresses,
    record_bytes: int,
    *,
    head: Callable[[int], bytes],
    coder: RecordCoder,
    group: int,
    may_code: bool,
    timeout_s: float,
) -> None:
    """Sends records behind the head that says in which code they are; 0: in none. `may_code`: both sides want
    it. Raises what the link raises."""
    begun_s = time.monotonic()
    end_s = begun_s + timeout_s
    # Whether the first one is coded says it for all: where it is not, the others go at once, from their slots.
    first = None
    if may_code and len(slots):
        first = coder.encode(group, view_slot(int(slots[0]), record_bytes), is_wanted=True)
    if first is None:
        with coder.sending():
            link.send(head(0), np.ascontiguousarray(slots).data, record_bytes, timeout_ms=_left_ms(end_s))
            coder.told_sent(len(slots) * record_bytes)
        return
    coding_s = time.monotonic() - begun_s
    with coder.sending():
        link.send(head(CODE), timeout_ms=_left_ms(end_s))
    for at in range(len(slots)):
        coded = first if at == 0 else None
        if at and coding_s < CODING_S:
            begun_s = time.monotonic()
            coded = coder.encode(group, view_slot(int(slots[at]), record_bytes), is_wanted=True)
            coding_s += time.monotonic() - begun_s
        # Neither is copied: the code's bytes are sent from where they are, as those of a slot.
        sent = slots[at : at + 1] if coded is None else _address_of(coded)
        size_bytes = record_bytes if coded is None else len(coded)
        with coder.sending():
            length = _LENGTH.pack(0 if coded is None else len(coded))
            link.send(length, np.ascontiguousarray(sent).data, size_bytes, timeout_ms=_left_ms(end_s))
            coder.told_sent(size_bytes)


def receive_records(
    link: native.RecordLink,
    names: RecordNames,
    slots: Addresses,
    record_bytes: int,
    *,
    claimed: Digests,
    code: int,
    coder: RecordCoder,
    timeout_s: float,
) -> Digests:
    """Receives records to their slots. Returns their digests; where what came is no record, another one than `claimed`,
    which is what it should be. `coder` is `reading`. Raises what the link raises."""
    room = np.ascontiguousarray(slots).data
    if code == 0:
        came = link.receive_records(
            room,
            record_bytes,
            fingerprint=names.fingerprint,
            block_hashes=names.hashes,
            group=names.group,
            shard=names.shard,
            timeout_ms=_to_ms(timeout_s),
        )
        coder.told_read(len(slots) * record_bytes)
        return np.frombuffer(came, np.uint64)
    came, whole, count, coded_bytes, decoding_s = link.receive_coded_records(
        room,
        record_bytes,
        fingerprint=names.fingerprint,
        block_hashes=names.hashes,
        group=names.group,
        shard=names.shard,
        timeout_ms=_to_ms(timeout_s),
    )
    coder.told_read((len(slots) - count) * record_bytes)
    if count:
        coder.told_came(count, record_bytes=count * record_bytes, coded_bytes=coded_bytes, taken_s=decoding_s)
    return np.where(np.frombuffer(whole, np.bool_), np.frombuffer(came, np.uint64), ~claimed)


def _address_of(data: bytes) -> Addresses:
    """Valid as long as they are."""
    return np.array([np.frombuffer(data, np.uint8).ctypes.data], np.uint64)


def _left_ms(end_s: float) -> int:
    return _to_ms(end_s - time.monotonic())


def _to_ms(duration_s: float) -> int:
    return max(int(duration_s * 1000), 1)

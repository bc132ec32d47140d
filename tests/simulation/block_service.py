"""A model of the native code that serves blocks: what operations do in the cache, and how answers look on the wire."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvoffload.cache import Acquired as CacheAcquired
from kvoffload.cache import Ask, CommitOutcome, LeaseId, LocalCache, SessionId, StoredBlocks
from kvoffload.hash_rows import choose_rows
from kvoffload.protocol import (
    Abort,
    Acquire,
    Acquired,
    AcquireEntries,
    ClientMessage,
    Credits,
    CreditsGranted,
    Error,
    ErrorCode,
    Invalidate,
    LeasedSlots,
    Publish,
    Release,
)
from kvoffload.protocol.limits import FRAME_BYTES
from kvoffload.server.common.refusal import refuse
from kvoffload.server.sessions.session import Registration
from kvoffload.types import AcquireOutcome

Numbers: TypeAlias = npt.NDArray[np.uint64]

_WIRE = np.dtype("<u8")
_ACQUIRED_BYTES = 64
_LEASED_SLOTS_BYTES = 32
"""Of the items around an answer's blobs, at most."""


def check_names(registration: Registration, message: ClientMessage) -> Error | None:
    """Whether the namespace, the group and the shards that a message names exist."""
    name_space = getattr(message, "name_space", registration.name_space)
    if name_space != registration.name_space:
        return refuse(message, ErrorCode.NOT_FOUND, f"namespace {name_space} is not the session's")
    groups = registration.register.groups
    group = getattr(message, "group", None)
    if group is not None and group >= len(groups):
        return refuse(message, ErrorCode.NOT_FOUND, f"there is no group {group}, there are {len(groups)}")
    named = getattr(message, "shards", ())
    if isinstance(message, Publish):
        named = (message.shard + message.more_shards,)
    if named:
        shards = max((settings.shards for settings in (groups if group is None else (groups[group],))), default=0)
        if max(named) >= shards:
            return refuse(message, ErrorCode.NOT_FOUND, f"there is no shard {max(named)}, there are {shards}")
    return None


def acquire(cache: LocalCache, session: SessionId, message: Acquire | AcquireEntries) -> Acquired | Error:
    """A hit's answer must fit a frame, or there is no lease."""
    shards = message.shards
    found = _ask(cache, session, message)
    if not found.is_hit:
        return Acquired(outcome=found.outcome, boundary=found.boundary)
    size = _answer_bytes(found, len(shards))
    if size > FRAME_BYTES:
        cache.release(session, found.lease)
        line = f"the answer has {size} bytes, allowed are {FRAME_BYTES}: ask for fewer blocks or shards"
        return refuse(message, ErrorCode.TOO_LARGE, line)
    slots = [
        LeasedSlots(first=group.first, addresses=_to_blob(group.addresses), digests=_to_blob(group.digests))
        for group in found.groups
    ]
    if isinstance(message, AcquireEntries):
        slots = [slots[message.group]]
    return Acquired(outcome=AcquireOutcome.HIT, boundary=found.boundary, lease=found.lease, groups=tuple(slots))


def grant_credits(
    cache: LocalCache, session: SessionId, registration: Registration, message: Credits
) -> CreditsGranted | Error:
    """Fewer than asked for where there is no room, or where the session holds all it may."""
    if message.count and message.hashes:
        return refuse(message, ErrorCode.MALFORMED, "count and hashes at once")
    found = cache.reserve(
        session,
        message.name_space,
        message.group,
        count=message.count,
        hashes=message.hashes or None,
        tenant=registration.tenant,
    )
    return CreditsGranted(tickets=_to_blob(found.tickets), addresses=_to_blob(found.addresses))


def publish(
    cache: LocalCache,
    session: SessionId,
    registration: Registration,
    message: Publish,
    on_stored: Callable[[StoredBlocks], None],
) -> Error | None:
    """`on_stored` hears of the blocks that became readable. Void tickets are nothing to be told."""
    digests = _read_numbers(message.digests)
    if message.digests and not digests.all():
        return refuse(message, ErrorCode.MALFORMED, "0 is no record's digest")
    tickets = _read_numbers(message.tickets)
    shards = message.more_shards + 1
    if len(digests) not in (0, shards * len(tickets)):
        line = f"{len(digests)} digests for {len(tickets)} records of each of {shards} shards"
        return refuse(message, ErrorCode.MALFORMED, line)
    for index in range(shards):
        outcomes = cache.commit(
            session,
            message.name_space,
            message.group,
            tickets,
            hashes=message.hashes,
            parents=message.parents or None,
            digests=digests[index * len(tickets) : (index + 1) * len(tickets)] if message.digests else None,
            shard=message.shard + index,
            tenant=_find_tenant(registration, message.tenant),
        )
        is_stored = outcomes == CommitOutcome.READABLE
        if is_stored.any():
            parents = choose_rows(message.parents, is_stored) if message.parents else b""
            on_stored(StoredBlocks(message.group, choose_rows(message.hashes, is_stored), parents))
    return None


def abort(cache: LocalCache, session: SessionId, message: Abort) -> None:
    cache.abort(session, _read_numbers(message.tickets))


def release(cache: LocalCache, session: SessionId, message: Release) -> None:
    for lease in _read_numbers(message.leases).tolist():
        cache.release(session, LeaseId(lease))


def invalidate(cache: LocalCache, message: Invalidate) -> None:
    cache.invalidate(message.name_space, message.group, message.hashes)


def _find_tenant(registration: Registration, place: int) -> int | None:
    """Finds the tenant that a publish names. None: the tenant to which the slots were granted."""
    tenants = tuple(registration.tenants.values())
    return tenants[place - 1] if 0 < place <= len(tenants) else None


def _ask(cache: LocalCache, session: SessionId, message: Acquire | AcquireEntries) -> CacheAcquired:
    if isinstance(message, AcquireEntries):
        return cache.acquire_entries(session, message.name_space, message.group, message.hashes, shards=message.shards)
    return cache.acquire(
        session,
        message.name_space,
        Ask(
            message.chain, local=message.local, limit=message.limit, alignment=message.alignment, shards=message.shards
        ),
    )


def _answer_bytes(found: CacheAcquired, shards: int) -> int:
    blocks = sum(len(group.addresses) for group in found.groups)
    return _ACQUIRED_BYTES + len(found.groups) * _LEASED_SLOTS_BYTES + blocks * 8 * (1 + shards)


def _to_blob(numbers: Numbers) -> bytes:
    return numbers.astype(_WIRE, copy=False).tobytes()


def _read_numbers(blob: bytes) -> Numbers:
    return np.frombuffer(blob, _WIRE).astype(np.uint64, copy=False)

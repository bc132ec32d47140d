"""The cache in this process: the face of the native core. Everything a server does with its pool goes through here."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from typing_extensions import Buffer

from kvoffload import native
from kvoffload.cache.answers import (
    Acquired,
    Addresses,
    AdoptionReport,
    CacheStats,
    CurvePoint,
    Departed,
    FoundEntries,
    LeasedGroup,
    LeaseFor,
    LeaseId,
    Leaving,
    ListedBlocks,
    MemoryCurve,
    RemovedBlocks,
    Reservation,
    Residence,
    SessionId,
    Shrunk,
    TenantUsage,
    Tickets,
)
from kvoffload.cache.ask import NO_LIMIT, Ask
from kvoffload.cache.settings import CacheFiles, CacheGeometry, CacheOwner, CacheSettings
from kvoffload.errors import CacheMemoryError
from kvoffload.types import AcquireOutcome, Fingerprint
from kvoffload.units import format_size

NOBODY = CacheOwner()


class LocalCache:
    """Safe to call from any thread; the GIL is released while the core works. Not to be used in a forked child.

    Hashes, parents and digests are contiguous buffers: 32 bytes a hash, 8 a digest. A broken contract (a wrong length,
    a group that does not exist) is a ValueError. Nothing here waits for another process; `reserve` and `commit` may
    wait for each other for the time that one moves a record. `lookup`, `acquire` and `release` wait for no writer, but
    `acquire` for one that has to forget a damaged block. Who must never wait has the calls whose names begin with
    `leave_`, and all that say nothing of writers but `evict`, `clear`, `find_departed`, `find_stored` and `survey`.
    """

    def __init__(self, core: native.Cache) -> None:
        self._core = core
        self._growth = native.PopulateProgress()
        self._is_growth_stopped = False
        self._given_back_bytes = 0
        self.memory_reason = ""
        """Why the pool is smaller than its full size, as metrics name it. Its owner sets it."""
        self._bases: Addresses | None = None
        self._segment_bytes = 0

    @classmethod
    def begin(cls, settings: CacheSettings, owner: CacheOwner = NOBODY) -> Self:
        """A cache with the memory of its first step, which takes a moment. The rest comes with `grow`.

        CacheMemoryError: it cannot be had, with the bound that says so.
        """
        try:
            core = native.create_cache(
                pool_bytes=settings.memory_bytes,
                segment_bytes=settings.segment_bytes,
                extent_bytes=settings.extent_bytes,
                entry_limit=settings.limit_entries(),
                policy=settings.policy,
                verifies_always=settings.verify == "always",
                huge_pages=settings.huge_pages,
                threads=settings.threads,
                keep_free_bytes=settings.keep_free_bytes,
                step_bytes=settings.step_bytes,
                is_sparse=settings.is_sparse,
                owner=owner.as_tuple(),
            )
        except RuntimeError as fault:
            raise CacheMemoryError(
                f"{format_size(settings.memory_bytes)} for cached blocks cannot be had: {fault}",
                remedy="set a smaller memory, or give this process more",
                memory_bytes=settings.memory_bytes,
            ) from fault
        return cls(core)

    @classmethod
    def create(cls, settings: CacheSettings, *, progress: Callable[[int, int], None] | None = None) -> Self:
        """Takes all memory first, about half a second per GiB; `progress(ready_bytes, capacity_bytes)` hears of it.

        CacheMemoryError: it cannot be had, with the bound that says so. An exception out of `progress` cancels.
        """
        cache = cls.begin(settings)
        try:
            while cache.grow():
                if progress is not None:
                    progress(cache.ready_bytes, cache.capacity_bytes)
            if progress is not None:
                progress(cache.ready_bytes, cache.capacity_bytes)
        except BaseException:
            cache.close()
            raise
        return cache

    def grow(self, keep_free_bytes: int = 0) -> bool:
        """Takes the next step of memory, while other calls go on. False: there is no more to take, or growing was
        stopped. Blocks for about half a second per GiB and thread.

        While a step is taken nothing is evicted: a reservation that finds no room is refused until the step has come.
        `keep_free_bytes` of memory are left to others, and at least one part in 32. Segments that `shrink` has not
        given back yet are used again.

        CacheMemoryError: memory is short. Nothing has changed, and it may be had later.
        """
        try:
            return self._core.grow(self._growth, keep_free_bytes)
        except RuntimeError as fault:
            if self._is_growth_stopped:
                return False
            raise CacheMemoryError(
                str(fault), remedy="give this process more memory, or let others have less"
            ) from fault

    def shrink(self, target_bytes: int) -> Shrunk:
        """Gives back whole segments at the pool's end until `target_bytes` are left, rounded up to a segment, while
        other calls go on. What is worth least is evicted, and the rest moves to the other segments.

        Segments with leased or reserved slots, and those before them, stay until these are gone, so call it again until
        `is_done`; `grow` ends it. CacheMemoryError: nothing can be given back.
        """
        try:
            shrunk = Shrunk(*self._core.shrink(target_bytes))
        except (RuntimeError, ValueError) as fault:
            raise CacheMemoryError(str(fault), remedy="set a smaller memory") from fault
        self._given_back_bytes += shrunk.freed_bytes
        return shrunk

    @property
    def is_leaving(self) -> bool:
        """Whether there is memory that should be given back and is in use still."""
        return self._core.is_leaving()

    def stop_growing(self) -> None:
        """Stops growing, from any thread: the step that is being taken is given up, and so is each later one."""
        self._is_growth_stopped = True
        self._growth.cancel()

    @property
    def capacity_bytes(self) -> int:
        """Returns the bytes of all segments."""
        return self._core.capacity_bytes()

    @property
    def ready_bytes(self) -> int:
        """Bytes of the capacity that have their memory by now."""
        return self._core.ready_bytes()

    @classmethod
    def adopt(
        cls,
        files: CacheFiles,
        settings: CacheSettings,
        *,
        owner: CacheOwner = NOBODY,
        former_boot_id: int = 0,
        tenants: Mapping[str, int] | None = None,
    ) -> Self:
        """Takes over the memory of a process that has ended, as far as it had grown, with everything whole in it. Takes
        the descriptors.

        `tenants` share the pool from then on, each with its quota in bytes, 0 for none; blocks of other tenants belong
        to none then. None: the tenants stay as they were.

        Settings that the files determine are ignored. CacheMemoryError: the process lives, or the files are no use: not
        this user's, not of the owner's domain, not of the process with `former_boot_id` (0: any), or held by users who
        may not have the owner's.
        """
        try:
            core = native.adopt_cache(
                lock=files.lock,
                index=files.index,
                segments=list(files.segments),
                policy=settings.policy,
                verifies_always=settings.verify == "always",
                threads=settings.threads,
                keep_free_bytes=settings.keep_free_bytes,
                step_bytes=settings.step_bytes,
                tenants=None if tenants is None else list(tenants.items()),
                owner=owner.as_tuple(),
                former_boot_id=former_boot_id,
            )
        except (RuntimeError, ValueError) as fault:
            raise CacheMemoryError(f"the cache cannot be adopted: {fault}", remedy="start with new memory") from fault
        return cls(core)

    def close(self) -> None:
        """Ends the use of the memory, which stays while a view or another process holds it. Calls raise afterwards."""
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def core(self) -> native.Cache:
        """The native cache, for native code that serves it."""
        return self._core

    @property
    def files(self) -> CacheFiles:
        """The descriptors to send to engines, which keep the memory alive beyond this process."""
        lock, index, segments = self._core.files()
        return CacheFiles(lock=lock, index=index, segments=tuple(segments))

    def open_index(self) -> int:
        """A new descriptor of the index for `IndexReader`, which cannot write through it. The caller closes it."""
        return os.dup(self.files.index)

    def open_signed_index(self, session: SessionId, *, heeds: bool = True) -> int:
        """The index for one process of the session, to be sent and closed. For as long as the process has it open or
        mapped, successors know that it lives, even where they cannot see it. `heeds`: the process knows that memory may
        be given back. ValueError: there is no such session."""
        return self._core.open_index(session, heeds)

    def note_user(self, uid: int) -> None:
        """Before a process of this user is sent the files: successors that do not admit him will not adopt them."""
        self._core.note_user(uid)

    @property
    def adoption(self) -> AdoptionReport:
        """Counts of the entries found in adopted memory; zeros if no memory was adopted."""
        readable, reserved, dropped = self._core.adoption()
        return AdoptionReport(readable=readable, reserved=reserved, dropped=dropped)

    def open_namespace(self, fingerprint: Fingerprint, geometry: CacheGeometry) -> int:
        """The number of an identity; the same for the same fingerprint, which must have the same geometry."""
        groups = [
            (group.record_bytes, group.rule.block_size, group.rule.window, group.shards, int(group.rule.reuse))
            for group in geometry.groups
        ]
        return self._core.open_namespace(fingerprint, geometry.hash_block_size, groups)

    def forget_namespaces(self, kept: Iterable[int]) -> list[int]:
        """Forgets identities without blocks, except the kept ones and those that a call is still using; returns their
        numbers. These name no identity from then on: a call with one finds no blocks, and leaves none."""
        return self._core.forget_namespaces(list(kept))

    def open_tenant(self, name: str, *, quota_bytes: int = 0) -> int:
        """The number of a tenant. Over its quota, it loses its own entries before others lose theirs."""
        return self._core.open_tenant(name, quota_bytes)

    def open_session(self, *, held_limit_bytes: int = NO_LIMIT, owner: int | None = None) -> SessionId:
        """An engine, with all the processes that `add_process` names. It holds at most so much in leases and
        reservations together. `owner` is the user whose sessions share a part of the cache, so that something is left
        for other users; None: there is no need for that."""
        return SessionId(self._core.open_session(held_limit_bytes, owner))

    def add_process(self, session: SessionId, *, pid: int | None = None, pidfd: int | None = None) -> None:
        """Adds a process to a session, which lives as long as its processes. Takes the pidfd."""
        if (pid is None) == (pidfd is None):
            raise ValueError("a process is named by its number or by a pidfd")
        if pidfd is not None:
            self._core.add_pidfd(session, pidfd)
        elif pid is not None:
            self._core.add_process(session, pid)

    def quarantine_session(self, session: SessionId) -> bool:
        """Its connection is gone: it gets nothing new and keeps what it has until all its processes have exited."""
        return self._core.quarantine(session)

    def reopen_session(self, session: SessionId, *, owner: int | None = None) -> bool:
        """Reopens a quarantined session whose engine is back. The engine names its processes again. `owner`: as for
        `open_session`, which adopted memory does not tell."""
        return self._core.reopen(session, owner)

    def reclaim_ended(self) -> int:
        """Takes back what sessions held all of whose processes have exited; how many there were."""
        return self._core.reclaim_ended()

    def held_bytes(self, session: SessionId) -> int:
        """Returns the bytes in leases and reservations."""
        return self._core.held_bytes(session)

    def lookup(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.bool_]:
        """Returns which blocks are readable now. Changes nothing."""
        return np.frombuffer(self._core.lookup(name_space, group, hashes), dtype=np.bool_)

    def acquire(self, session: SessionId, name_space: int, ask: Ask) -> Acquired:
        """The longest boundary that all groups accept, and a lease on the slots that a load up to it needs."""
        found = self._core.acquire(session, name_space, *ask)
        return _read_acquired(found, len(ask.shards))

    def acquire_entries(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        hashes: Buffer,
        *,
        shards: Sequence[int] = (),
        lease_for: LeaseFor = LeaseFor.USE,
    ) -> Acquired:
        """A lease on these blocks of one group, all or none."""
        found = self._core.acquire_entries(session, name_space, group, hashes, shards, lease_for)
        return _read_acquired(found, len(shards))

    def find_used(
        self, name_space: int, group: int, hashes: Buffer, *, since: int | None = None
    ) -> npt.NDArray[np.bool_]:
        """Returns which blocks are readable and were acquired for use since they became so; with `since`, since
        `use_clock` had that value."""
        return np.frombuffer(self._core.find_used(name_space, group, hashes, since), dtype=np.bool_)

    def find_values(self, name_space: int, group: int, hashes: Buffer) -> npt.NDArray[np.float64]:
        """Returns what each block is worth to the eviction policy: of two blocks, the one with the lower number is
        evicted first, unless others need it. Blocks that are not readable have the lowest number."""
        return np.frombuffer(self._core.find_values(name_space, group, hashes), dtype=np.float64)

    @property
    def use_clock(self) -> int:
        """A number that grows with every acquire for use."""
        return self._core.use_clock()

    @property
    def without_room(self) -> int:
        """Number of reservations so far that found no room, not counting those of promotions from tiers."""
        return self._core.without_room()

    def find_departed(self, name_space: int, group: int, hashes: Buffer) -> list[Departed | None]:
        """Returns why and when blocks left memory; None for those of which that is not remembered."""
        found = self._core.find_departed(name_space, group, hashes)
        return [
            None if one is None else Departed(why=Leaving(one[0]), seconds_ago=one[1], missing_bytes=one[2])
            for one in found
        ]

    def find_stored(self, name_space: int, group: int, hashes: Buffer) -> list[int | None]:
        """Returns for how many seconds blocks have been readable; None where this process did not make them so."""
        return self._core.find_stored(name_space, group, hashes)

    def survey(self, prefix: Buffer, *, limit: int) -> FoundEntries:
        """Readable entries whose hashes begin so. Walks the whole index: about 10 ns an entry."""
        matches, hashes, *columns = self._core.survey(prefix, limit)
        name_spaces, groups, seconds, leases, tenants, used = map(_numbers, columns)
        return FoundEntries(
            matches=matches,
            hashes=hashes,
            name_spaces=name_spaces,
            groups=groups,
            seconds=seconds,
            leases=leases,
            tenants=tenants,
            used=used,
        )

    def list_blocks(self, name_space: int, *, first: int = 0, limit: int) -> ListedBlocks:
        """Some readable blocks of an identity: from the beginning, or from where the last ones ended. A block that is
        readable from the first to the last call is listed, once. Takes less than a millisecond or two."""
        following, groups, hashes, parents = self._core.list_blocks(name_space, first, limit)
        return ListedBlocks(next=following, groups=_numbers(groups), hashes=hashes, parents=parents)

    def watch_removed(self, is_wanted: bool) -> None:
        """Whether blocks that cannot be found any more are kept for `take_removed` from now on."""
        self._core.watch_removed(is_wanted)

    def take_removed(self, limit: int) -> RemovedBlocks:
        """The oldest of the blocks that were removed, so many at most. Each is taken once; it may be there again."""
        parts, lost, is_all = self._core.take_removed(limit)
        return RemovedBlocks(parts=parts, lost=lost, is_all=is_all)

    def release(self, session: SessionId, lease: LeaseId) -> bool:
        """Ends a lease. False: the session has no such lease (any more)."""
        return self._core.release(session, lease)

    def reserve(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        *,
        count: int = 0,
        hashes: Buffer | None = None,
        tenant: int = 0,
    ) -> Reservation:
        """Reserves `count` slots; or with `hashes` one for each block that is not readable, ticket 0 for the others."""
        tickets, addresses = self._core.reserve(session, tenant, name_space, group, count, hashes)
        return Reservation(_numbers(tickets), _numbers(addresses))

    def commit(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        tickets: Tickets,
        *,
        hashes: Buffer,
        parents: Buffer | None = None,
        digests: npt.NDArray[np.uint64] | None = None,
        shard: int = 0,
        tenant: int | None = None,
    ) -> npt.NDArray[np.uint8]:
        """Commits the written records of one shard and returns an outcome for each, as numbers of `CommitOutcome`.

        `parents` name the block before each, zeros for none; of a window or a state the block of the first prefix group
        that ends at the same token. Without `digests` the cache makes them, which reads the records once. `tenant`
        pays from here on; without it, the tenant that reserved them still pays.
        """
        outcomes = self._core.commit(
            session=session,
            name_space=name_space,
            group=group,
            shard=shard,
            tickets=_as_buffer(tickets, "tickets"),
            hashes=hashes,
            parents=parents,
            digests=None if digests is None else _as_buffer(digests, "digests"),
            tenant=tenant,
        )
        return np.frombuffer(outcomes, dtype=np.uint8)

    def abort(self, session: SessionId, tickets: Tickets) -> int:
        """Gives reserved slots back, written or not; how many of the tickets were valid."""
        return self._core.abort(session, _as_buffer(tickets, "tickets"))

    def invalidate(self, name_space: int, group: int, hashes: Buffer) -> int:
        """Forgets blocks whose bytes are not to be trusted; how many were there. Leases on them stay good."""
        return self._core.invalidate(name_space, group, hashes)

    # ---- for a thread that never waits for a writer ----

    def leave_reserve(
        self, session: SessionId, name_space: int, group: int, *, hashes: Buffer
    ) -> Callable[[], Reservation | None]:
        """Reserves without waiting: at once where no thread writes, else that thread does it before others write.

        What is returned gives the reservation; None: it is not made yet. All that is left so is done in its order.
        """
        left = self._core.leave_reserve(session, name_space, group, hashes)

        def take() -> Reservation | None:
            found = self._core.take_reserved(session, left)
            return None if found is None else Reservation(_numbers(found[0]), _numbers(found[1]))

        return take

    def leave_commit(
        self,
        session: SessionId,
        name_space: int,
        group: int,
        tickets: Tickets,
        *,
        hashes: Buffer,
        parents: Buffer,
        digests: npt.NDArray[np.uint64],
        shard: int = 0,
    ) -> Callable[[], npt.NDArray[np.uint8] | None]:
        """Commits without waiting, like `leave_reserve`; what is returned gives the outcomes, or None."""
        numbers, sums = _as_buffer(tickets, "tickets"), _as_buffer(digests, "digests")
        left = self._core.leave_commit(session, name_space, group, shard, numbers, hashes, parents, sums)

        def take() -> npt.NDArray[np.uint8] | None:
            found = self._core.take_committed(left)
            return None if found is None else np.frombuffer(found, dtype=np.uint8)

        return take

    def leave_abort(self, session: SessionId, tickets: Tickets) -> None:
        """Gives reserved slots back without waiting, like `leave_reserve`."""
        self._core.leave_abort(session, _as_buffer(tickets, "tickets"))

    def leave_invalidate(self, name_space: int, group: int, hashes: Buffer) -> None:
        """Forgets blocks whose bytes are not to be trusted, without waiting, like `leave_reserve`."""
        self._core.leave_invalidate(name_space, group, hashes)

    def leave_tier_notes(self, name_space: int, group: int, hashes: Buffer, has: npt.NDArray[np.bool_]) -> None:
        """Lets eviction know which of these blocks a slower tier also has, without waiting, like `leave_reserve`:
        losing them costs less. Blocks that are not readable are passed over."""
        self._core.leave_tier_notes(name_space, group, hashes, has.tobytes())

    def leave_evict(self, name_spaces: Iterable[int]) -> bool:
        """Evicts all readable blocks of these identities without waiting, like `leave_reserve`. Those that are leased
        stay for as long. False: it is not over yet, or others are being evicted so and these have not begun."""
        return self._core.leave_evict(list(name_spaces))

    @property
    def is_evicting(self) -> bool:
        """Whether identities are being evicted by `leave_evict`, and others cannot be."""
        return self._core.is_evicting()

    def evict(self, size_bytes: int) -> int:
        """Evicts in the policy's order until so many bytes are freed, or all else is in use; how many were."""
        return self._core.evict(size_bytes)

    def clear(self, name_space: int) -> int:
        """Forgets all blocks of an identity; how many there were."""
        return self._core.clear(name_space)

    def view(self, address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot, to be written under a reservation and read under a lease. Keeps the memory alive.

        A forked child does not have this memory: touching a view there ends it by SIGSEGV.
        """
        return self._core.view(address, size_bytes)

    def pointers(self, addresses: Addresses) -> npt.NDArray[np.uint64]:
        """Returns where slots lie in this process. The caller may touch only slots that are leased or reserved."""
        if self._bases is None:
            count = len(self.files.segments)
            self._segment_bytes = os.fstat(self.files.segments[0]).st_size
            first = [self.view(segment * self._segment_bytes, 1).ctypes.data for segment in range(count)]
            self._bases = np.array(first, np.uint64)
        segment, offset = np.divmod(np.asarray(addresses, np.uint64), np.uint64(self._segment_bytes))
        pointers: npt.NDArray[np.uint64] = self._bases[segment] + offset
        return pointers

    @property
    def version(self) -> int:
        """A number that grows whenever an answer of `lookup` may have changed."""
        return self._core.version()

    @property
    def stats(self) -> CacheStats:
        """Counts at this moment."""
        found = self._core.stats()
        counts: dict[str, Any] = {name: value for name, value in found.items() if isinstance(value, int)}
        tenants = tuple(
            TenantUsage(name=name, quota_bytes=quota, used_bytes=used)
            for number, (name, quota, used) in enumerate(found["tenants"])
            if name or number == 0
        )
        bounds, buckets, sum_s = found["residence"]
        residence = Residence(bounds_s=tuple(bounds), counts=tuple(buckets), sum_s=sum_s)
        return CacheStats(
            tenants=tenants,
            residence=residence,
            given_back_bytes=self._given_back_bytes,
            memory_reason=self.memory_reason,
            **counts,
        )

    def used_by(self, name_space: int) -> int:
        """Returns the bytes of a namespace's slots."""
        return self._core.used_by(name_space)

    def used_by_each(self) -> Mapping[int, int]:
        """Returns the bytes of each namespace that has slots. That takes longer, the more of them there are."""
        return self._core.used_by_each()

    @property
    def memory_curve(self) -> MemoryCurve:
        """The hits to expect with less and with more memory."""
        return _read_curve(self._core.memory_curve())


def _read_curve(found: tuple[int, int, int, tuple[tuple[int, int, int], ...]]) -> MemoryCurve:
    one_in, asked_blocks, asked_bytes, sizes = found
    points = tuple(
        CurvePoint(memory=quarters / 4, hit_blocks=blocks, hit_bytes=size_bytes)
        for quarters, blocks, size_bytes in sizes
    )
    return MemoryCurve(asked_blocks=asked_blocks, asked_bytes=asked_bytes, one_in=one_in, points=points)


def _numbers(data: bytes) -> Addresses:
    return np.frombuffer(data, dtype=np.uint64)


def _as_buffer(numbers: npt.NDArray[np.uint64], name: str) -> memoryview:
    dtype = np.asarray(numbers).dtype
    if dtype != np.uint64:
        raise ValueError(f"{name} must have dtype uint64, not {dtype}")
    return np.ascontiguousarray(numbers).data


def _read_acquired(answer: tuple[int, int, int, tuple[tuple[int, bytes, bytes], ...]], shards: int) -> Acquired:
    outcome, boundary, lease, groups = answer
    return Acquired(
        AcquireOutcome(outcome),
        boundary,
        LeaseId(lease),
        tuple(
            LeasedGroup(first, _numbers(addresses), _numbers(digests).reshape(shards, len(addresses) // 8))
            for first, addresses, digests in groups
        ),
    )

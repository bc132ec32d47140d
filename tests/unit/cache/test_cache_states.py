"""The cache as a state machine: everything that sessions can do, against a plain model."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvoffload.cache import Ask, CommitOutcome, IndexReader, LocalCache, SessionId, needed_blocks
from tests.kit.cache.cache_model import (
    HYBRID,
    KIB,
    SMALL,
    CacheModel,
    ModelLease,
    ModelReservation,
    block_hashes,
    fingerprint,
    has_pattern,
    make_chain,
    slot_bytes,
    write_record,
)


class CacheMachine(RuleBasedStateMachine):
    """Everything that sessions can do, several at once, with processes that exit; checked after every step."""

    conversations = st.integers(0, 5)
    lengths = st.integers(1, 14)
    sessions = st.integers(0, 2)
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.cache = LocalCache.create(replace(SMALL, policy=self.policy))
        self.reader = IndexReader(self.cache.open_index())
        self.geometries = {self.cache.open_namespace(fingerprint(str(i)), HYBRID): HYBRID for i in range(2)}
        self.model = CacheModel()
        self.sessions_open = [self.cache.open_session() for _ in range(3)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * 3

    def teardown(self) -> None:
        for process in self.processes:
            if process is not None:
                process.kill()
                process.wait()
        self.cache.close()

    @rule(session=sessions, name_space=st.integers(0, 1), group=st.integers(0, 2), count=st.integers(1, 6))
    def reserve_slots(self, session: int, name_space: int, group: int, count: int) -> None:
        """A reserved slot belongs to no other session, whichever block was evicted for it."""
        owner = self.sessions_open[session]
        reservation = self.cache.reserve(owner, name_space, group, count=count)
        for ticket, address in zip(reservation.tickets, reservation.addresses, strict=True):
            self.model.reservations[int(ticket)] = ModelReservation(
                owner, (name_space, group), int(address), int(ticket)
            )
        self.learn_evictions()

    @rule(session=sessions, name_space=st.integers(0, 1), conversation=conversations, blocks=lengths)
    def save_request(self, session: int, name_space: int, conversation: int, blocks: int) -> None:
        """Saves a request, as an engine does after a prefill: every group's missing blocks, parents first."""
        owner = self.sessions_open[session]
        chain = make_chain(conversation, blocks)
        for group, rules in enumerate(HYBRID.groups):
            names = block_hashes(chain, HYBRID, group)
            parents = [bytes(32), *names] if group == 0 else names
            reservation = self.cache.reserve(owner, name_space, group, hashes=b"".join(names))
            self.learn_evictions()
            for name, parent, ticket, address in zip(
                names, parents, reservation.tickets, reservation.addresses, strict=False
            ):
                if ticket == 0:
                    continue
                for shard in range(rules.shards):
                    write_record(self.cache, HYBRID, (name_space, group), name, int(address), shard)
                    outcomes = self.cache.commit(
                        owner, name_space, group, np.array([ticket]), hashes=name, parents=parent, shard=shard
                    )
                    is_last = shard == rules.shards - 1
                    assert outcomes[0] == (CommitOutcome.READABLE if is_last else CommitOutcome.INCOMPLETE)
                self.model.readable.add((name_space, group, name))

    @precondition(lambda self: self.model.reservations)
    @rule(data=st.data(), conversation=conversations, position=st.integers(0, 13), is_someone_else=st.booleans())
    def commit_one(self, data: st.DataObject, conversation: int, position: int, is_someone_else: bool) -> None:
        """One shard of one reservation, under a name that may be taken, by its owner or by another session."""
        reservation = self.model.reservations[data.draw(st.sampled_from(sorted(self.model.reservations)))]
        name_space, group = reservation.space
        shards = HYBRID.groups[group].shards
        shard = data.draw(st.integers(0, shards - 1))
        name = (
            reservation.named
            or block_hashes(make_chain(conversation, 14), HYBRID, group)[
                position % (14 * 16 // HYBRID.groups[group].rule.block_size)
            ]
        )
        write_record(self.cache, HYBRID, reservation.space, name, reservation.address, shard)
        owner = reservation.session
        if is_someone_else:
            owner = next(session for session in self.sessions_open if session != reservation.session)
        outcome = self.cache.commit(
            SessionId(owner), name_space, group, np.array([reservation.ticket], np.uint64), hashes=name, shard=shard
        )[0]
        if is_someone_else:
            assert outcome == CommitOutcome.STALE
            return
        reservation.named = name
        reservation.shards.add(shard)
        if len(reservation.shards) < shards:
            assert outcome == CommitOutcome.INCOMPLETE
            return
        del self.model.reservations[reservation.ticket]
        is_taken = (name_space, group, name) in self.model.readable
        assert outcome == (CommitOutcome.DUPLICATE if is_taken else CommitOutcome.READABLE)
        self.model.readable.add((name_space, group, name))

    @precondition(lambda self: self.model.reservations)
    @rule(data=st.data())
    def abort_one(self, data: st.DataObject) -> None:
        """Aborts one reservation. A second abort of it has no effect."""
        ticket = data.draw(st.sampled_from(sorted(self.model.reservations)))
        session = SessionId(self.model.reservations.pop(ticket).session)
        assert self.cache.abort(session, np.array([ticket], np.uint64)) == 1
        assert self.cache.abort(session, np.array([ticket], np.uint64)) == 0

    @rule(
        session=sessions,
        name_space=st.integers(0, 1),
        conversation=conversations,
        blocks=lengths,
        local=st.integers(0, 100),
        limit=st.integers(0, 300),
    )
    def acquire(self, session: int, name_space: int, conversation: int, blocks: int, local: int, limit: int) -> None:
        """The plain rules' boundary, and a lease on exactly what a load needs, with the right bytes."""
        owner = self.sessions_open[session]
        chain = make_chain(conversation, blocks)
        expected = self.model.boundary(name_space, HYBRID, chain, local, limit)
        assert self.reader.find_boundary(name_space, Ask(chain, local=local, limit=limit)) == expected
        acquired = self.cache.acquire(owner, name_space, Ask(chain, local=local, limit=limit))
        assert acquired.boundary == expected
        assert acquired.is_hit == (expected != local)
        if not acquired.is_hit:
            return
        slots = {}
        for group, (leased, rules) in enumerate(zip(acquired.groups, HYBRID.groups, strict=True)):
            needed = needed_blocks(rules.rule, local=local, boundary=expected)
            assert (leased.first, len(leased.addresses)) == (needed.start, len(needed))
            names = block_hashes(chain, HYBRID, group)
            for position, address in zip(needed, leased.addresses, strict=True):
                slots[int(address)] = (name_space, group, names[position])
        self.model.leases[acquired.lease] = ModelLease(owner, slots)

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        """Releases one lease by its own session, once."""
        lease = data.draw(st.sampled_from(sorted(self.model.leases)))
        owner = SessionId(self.model.leases.pop(lease).session)
        other = next(session for session in self.sessions_open if session != owner)
        assert not self.cache.release(other, lease)
        assert self.cache.release(owner, lease)
        assert not self.cache.release(owner, lease)

    @rule(name_space=st.integers(0, 1), conversation=conversations, group=st.integers(0, 2))
    def invalidate(self, name_space: int, conversation: int, group: int) -> None:
        """A miss from now on; leases go on."""
        names = block_hashes(make_chain(conversation, 14), HYBRID, group)
        known = {(name_space, group, name) for name in names} & self.model.readable
        assert self.cache.invalidate(name_space, group, b"".join(names)) == len(known)
        self.model.drop(known)

    @rule(name_space=st.integers(0, 1))
    def clear(self, name_space: int) -> None:
        """One identity's blocks and no other's."""
        known = {block for block in self.model.readable if block[0] == name_space}
        assert self.cache.clear(name_space) == len(known)
        self.model.drop(known)

    @rule(size=st.integers(0, 200 * KIB))
    def evict(self, size: int) -> None:
        """As much as was asked for, unless the rest is in use."""
        freed = self.cache.evict(size)
        before = len(self.model.readable)
        self.learn_evictions()
        if freed < size:
            assert self.model.readable <= self.unevictable_blocks()
        assert (freed > 0) == (len(self.model.readable) < before)

    @rule(session=sessions, exits=st.booleans())
    def end_session(self, session: int, exits: bool) -> None:
        """A closed connection frees nothing; the end of its process frees everything."""
        ended = self.sessions_open[session]
        if exits:
            process = subprocess.Popen(["sleep", "1000"])
            self.cache.add_process(ended, pid=process.pid)
            assert self.cache.quarantine_session(ended)
            assert self.cache.reclaim_ended() == 0
            self.check_bytes()
            process.kill()
            process.wait()
        else:
            assert self.cache.quarantine_session(ended)
        assert self.cache.reclaim_ended() == 1
        self.model.leases = {key: lease for key, lease in self.model.leases.items() if lease.session != ended}
        self.model.reservations = {key: held for key, held in self.model.reservations.items() if held.session != ended}
        self.sessions_open[session] = self.cache.open_session()

    def unevictable_blocks(self) -> set[tuple[int, int, bytes]]:
        """Returns what is leased."""
        return self.model.leased_blocks()

    def learn_evictions(self) -> None:
        """Nothing that is leased may have lost its name by an eviction."""
        gone = {block for block in self.model.readable if not self.cache.lookup(block[0], block[1], block[2])[0]}
        assert not gone & self.model.leased_blocks()
        self.model.readable -= gone

    @invariant()
    def check_bytes(self) -> None:
        """Leased slots keep their bytes, whatever became of their names."""
        for lease in self.model.leases.values():
            for address, (name_space, group, name) in lease.slots.items():
                assert has_pattern(self.cache, HYBRID, (name_space, group), name, address)

    @invariant()
    def check_slots(self) -> None:
        """No slot is used twice, and the counts have no slot that is not in use."""
        addresses = self.model.used_addresses()
        assert len(addresses) == len(set(addresses))
        stats = self.cache.stats
        assert stats.readable == len(self.model.readable)
        assert stats.reserved == len(self.model.reservations)
        assert stats.leases == len(self.model.leases)
        quarantined = {
            (address, block)
            for lease in self.model.leases.values()
            for address, block in lease.slots.items()
            if block not in self.model.readable or self.address_of(block) != address
        }
        assert stats.quarantined == len(quarantined)
        assert stats.used_bytes == sum(
            [slot_bytes(HYBRID, group) for _, group, _ in self.model.readable]
            + [slot_bytes(HYBRID, held.space[1]) for held in self.model.reservations.values()]
            + [slot_bytes(HYBRID, block[1]) for _, block in quarantined]
        )

    def address_of(self, block: tuple[int, int, bytes]) -> int:
        probe = self.cache.open_session()
        acquired = self.cache.acquire_entries(probe, *block)
        address = int(acquired.groups[block[1]].addresses[0])
        self.cache.release(probe, acquired.lease)
        self.cache.quarantine_session(probe)
        self.cache.reclaim_ended()
        return address


class PrefixCacheMachine(CacheMachine):
    """The same by the default policy, which keeps a block while one behind it, or what belongs to one, is leased."""

    policy = "prefix"

    def unevictable_blocks(self) -> set[tuple[int, int, bytes]]:
        """Lists leased blocks, and the attention blocks up to them."""
        leased = self.model.leased_blocks()
        kept = set(leased)
        for conversation in range(6):
            names = block_hashes(make_chain(conversation, 14), HYBRID, 0)
            for name_space, _, name in leased:
                if name in names:
                    kept |= {(name_space, 0, before) for before in names[: names.index(name) + 1]}
        return kept


for machine in (CacheMachine, PrefixCacheMachine):
    machine.TestCase.settings = settings(stateful_step_count=40, deadline=None)
TestCacheMachine = CacheMachine.TestCase
TestPrefixCacheMachine = PrefixCacheMachine.TestCase

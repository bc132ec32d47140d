"""The cache's verbs: a state machine against a simple model, and one test per rule."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvoffload.cache import EntryKey, Lease, PlainIndex
from kvoffload.types import BlockHash

RECORD_BYTES = (10, 25)
CAPACITY = 100


def key(name: int, group: int = 0) -> EntryKey:
    return EntryKey(group, BlockHash(name.to_bytes(32, "big")))


def make_index(capacity: int = CAPACITY) -> PlainIndex:
    return PlainIndex(record_bytes=RECORD_BYTES, capacity_bytes=capacity)


def save(index: PlainIndex, *keys: EntryKey) -> list[int]:
    """Reserve all, then commit the deepest first, as a finished save does."""
    slots = [index.reserve(one) for one in keys]
    assert None not in slots
    for slot in reversed(slots):
        index.commit(slot)  # type: ignore[arg-type]
    return slots  # type: ignore[return-value]


def lease_of(index: PlainIndex, *keys: EntryKey) -> Lease:
    lease = index.acquire(keys)
    assert lease is not None
    return lease


def test_an_entry_is_found_after_its_commit_and_not_before() -> None:
    index = make_index()
    slot = index.reserve(key(1))
    assert slot is not None
    assert index.holds(key(1))
    assert not index.lookup(key(1))
    assert index.acquire([key(1)]) is None
    assert index.commit(slot)
    assert index.lookup(key(1))
    assert lease_of(index, key(1)).slots == (slot,)


def test_the_same_hash_in_two_groups_is_two_entries() -> None:
    index = make_index()
    save(index, key(1, group=0))
    assert not index.lookup(key(1, group=1))
    assert index.reserve(key(1, group=1)) is not None


def test_a_lease_is_all_or_nothing() -> None:
    index = make_index()
    save(index, key(1))
    assert index.acquire([key(1), key(2)]) is None
    assert index.stats.leased_entries == 0


def test_what_is_held_is_not_reserved_again() -> None:
    index = make_index()
    slot = index.reserve(key(1))
    assert index.reserve(key(1)) is None
    index.commit(slot)  # type: ignore[arg-type]
    assert index.reserve(key(1)) is None
    assert index.stats.refused == 0


def test_the_least_recently_released_is_evicted_first() -> None:
    index = make_index(capacity=30)
    slots = [save(index, key(name))[0] for name in range(3)]
    index.release(lease_of(index, key(0)))
    save(index, key(3))
    assert index.take_drops() == (slots[1],)
    assert [index.lookup(key(name)) for name in range(4)] == [True, False, True, True]


def test_parents_outlive_children_of_one_save() -> None:
    index = make_index(capacity=30)
    slots = save(index, key(0), key(1), key(2))
    save(index, key(9))
    assert index.take_drops() == (slots[2],)


def test_parents_outlive_children_of_one_released_lease() -> None:
    index = make_index(capacity=30)
    slots = [save(index, key(name))[0] for name in range(3)]  # parents first: children are the more recent ones
    index.release(lease_of(index, key(0), key(1), key(2)))
    save(index, key(8), key(9))
    assert index.take_drops() == (slots[2], slots[1])


def test_what_is_leased_is_never_evicted() -> None:
    index = make_index(capacity=20)
    save(index, key(0), key(1))
    lease = lease_of(index, key(0), key(1))
    assert index.reserve(key(2)) is None
    assert index.stats.refused == 1
    index.release(lease)
    assert index.reserve(key(2)) is not None


def test_a_record_that_cannot_fit_evicts_nothing() -> None:
    index = make_index(capacity=20)
    save(index, key(0), key(1))
    assert index.reserve(key(2, group=1)) is None  # 25 bytes
    assert index.lookup(key(0))
    assert index.lookup(key(1))
    assert index.take_drops() == ()


def test_a_record_that_does_not_fit_beside_what_is_leased_evicts_nothing() -> None:
    index = make_index(capacity=40)
    save(index, key(0), key(1), key(2))
    lease = lease_of(index, key(0), key(1))
    assert index.reserve(key(3, group=1)) is None  # 25 bytes beside 20 leased ones
    assert index.lookup(key(2))
    index.release(lease)
    assert index.reserve(key(3, group=1)) is not None


def test_an_invalidated_entry_is_a_miss_at_once_and_its_leases_stay_good() -> None:
    index = make_index()
    (slot,) = save(index, key(1))
    lease = lease_of(index, key(1))
    index.invalidate([key(1), key(2)])
    assert not index.holds(key(1))
    assert index.take_drops() == ()
    (newer,) = save(index, key(1))
    assert newer != slot
    index.release(lease)
    assert index.take_drops() == (slot,)
    assert index.lookup(key(1))


def test_an_entry_on_its_way_is_not_invalidated() -> None:
    """Nobody has read it yet: what failed was another record of that name."""
    index = make_index()
    slot = index.reserve(key(1))
    index.invalidate([key(1)])
    assert index.commit(slot)  # type: ignore[arg-type]
    assert index.lookup(key(1))


def test_what_was_reserved_before_a_clear_is_dropped_at_its_commit() -> None:
    index = make_index()
    old = index.reserve(key(1))
    assert old is not None
    index.clear()
    assert index.take_drops() == ()  # somebody is writing to it
    (new,) = save(index, key(1))
    assert not index.commit(old)
    assert index.take_drops() == (old,)
    assert lease_of(index, key(1)).slots == (new,)


def test_clear_forgets_names_at_once_and_slots_when_nobody_uses_them() -> None:
    index = make_index()
    idle, leased = save(index, key(1), key(2))
    lease = lease_of(index, key(2))
    index.clear()
    assert not index.holds(key(1))
    assert not index.holds(key(2))
    assert index.take_drops() == (idle,)
    index.release(lease)
    assert index.take_drops() == (leased,)
    assert index.stats.used_bytes == 0


def test_an_aborted_slot_can_be_reserved_again_under_its_name() -> None:
    index = make_index()
    slot = index.reserve(key(1))
    assert slot is not None
    index.abort(slot)
    assert index.take_drops() == (slot,)
    assert not index.holds(key(1))
    assert index.reserve(key(1)) not in (None, slot)


def test_aborting_an_old_slot_leaves_a_new_entry_of_its_name_alone() -> None:
    index = make_index()
    old = index.reserve(key(1))
    index.clear()
    save(index, key(1))
    index.abort(old)  # type: ignore[arg-type]
    assert index.lookup(key(1))


def test_the_version_grows_with_every_changed_answer() -> None:
    index = make_index()
    versions = [index.version]
    slot = index.reserve(key(1))
    assert index.version == versions[0]
    index.commit(slot)  # type: ignore[arg-type]
    versions.append(index.version)
    index.invalidate([key(1)])
    versions.append(index.version)
    save(index, key(2))
    index.clear()
    versions.append(index.version)
    assert versions == sorted(set(versions))


def test_misuse_is_an_assertion() -> None:
    index = make_index()
    (slot,) = save(index, key(1))
    with pytest.raises(AssertionError):
        index.commit(slot)
    with pytest.raises(AssertionError):
        index.abort(slot)
    lease = lease_of(index, key(1))
    index.release(lease)
    with pytest.raises(AssertionError):
        index.release(lease)


class IndexAgainstModel(RuleBasedStateMachine):
    """The model: what each slot is doing, and which name means which slot."""

    def __init__(self) -> None:
        super().__init__()
        self.index = make_index()
        self.reserved: dict[int, EntryKey] = {}
        self.readable: dict[int, EntryKey] = {}
        self.name_of: dict[EntryKey, int] = {}
        self.leases: list[Lease] = []
        self.dropped: set[int] = set()
        self.last_version = 0
        self.last_answers: frozenset[EntryKey] = frozenset()

    slots = Bundle("slots")
    leases_held = Bundle("leases_held")
    names = st.builds(key, st.integers(0, 7), st.integers(0, 1))

    def in_use(self) -> set[int]:
        return set(self.reserved) | {slot for lease in self.leases for slot in lease.slots}

    @rule(target=slots, name=names)
    def reserve(self, name: EntryKey) -> object:
        busy = self.in_use()
        busy_bytes = sum(RECORD_BYTES[(self.reserved | self.readable)[slot].group] for slot in busy)
        slot = self.index.reserve(name)
        if slot is None:
            assert name in self.name_of or busy_bytes + RECORD_BYTES[name.group] > CAPACITY
            return ()
        assert name not in self.name_of
        assert slot not in self.reserved | self.readable
        assert slot not in self.dropped
        self.reserved[slot] = name
        self.name_of[name] = slot
        return slot

    @rule(slot=consumes(slots))
    def commit(self, slot: object) -> None:
        if isinstance(slot, int):
            name = self.reserved.pop(slot)
            self.readable[slot] = name
            assert self.index.commit(slot) == (self.name_of.get(name) == slot)

    @rule(slot=consumes(slots))
    def abort(self, slot: object) -> None:
        if isinstance(slot, int):
            name = self.reserved.pop(slot)
            self.readable[slot] = name
            self.index.abort(slot)
            if self.name_of.get(name) == slot:
                del self.name_of[name]

    @rule(target=leases_held, wanted=st.lists(names, min_size=1, max_size=4))
    def acquire(self, wanted: list[EntryKey]) -> object:
        lease = self.index.acquire(wanted)
        if lease is None:
            assert any(self.name_of.get(name) not in self.readable for name in wanted)
            return ()
        assert lease.slots == tuple(self.name_of[name] for name in wanted)
        self.leases.append(lease)
        return lease

    @rule(lease=consumes(leases_held))
    def release(self, lease: object) -> None:
        if isinstance(lease, Lease):
            self.leases.remove(lease)
            self.index.release(lease)

    @rule(names=st.lists(names, max_size=3))
    def invalidate(self, names: list[EntryKey]) -> None:
        self.index.invalidate(names)
        for name in names:
            if self.name_of.get(name) in self.readable:
                del self.name_of[name]

    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.name_of.clear()

    @invariant()
    def every_rule_holds(self) -> None:
        self.drops_come_once_and_never_from_under_a_user()
        self.answers_are_those_of_the_model()
        self.the_version_changes_with_the_answers()
        self.bytes_are_counted_and_bounded()

    def drops_come_once_and_never_from_under_a_user(self) -> None:
        busy = self.in_use()
        for slot in self.index.take_drops():
            assert slot not in busy
            assert slot not in self.dropped
            self.dropped.add(slot)
            name = self.readable.pop(slot)
            if self.name_of.get(name) == slot:  # evicted
                del self.name_of[name]

    def answers_are_those_of_the_model(self) -> None:
        for name in (key(number, group) for number in range(8) for group in (0, 1)):
            assert self.index.holds(name) == (name in self.name_of)
            assert self.index.lookup(name) == (self.name_of.get(name) in self.readable)

    def the_version_changes_with_the_answers(self) -> None:
        answers = frozenset(name for name, slot in self.name_of.items() if slot in self.readable)
        if answers != self.last_answers:
            assert self.index.version > self.last_version
        self.last_version, self.last_answers = self.index.version, answers

    def bytes_are_counted_and_bounded(self) -> None:
        stats = self.index.stats
        held = self.reserved | self.readable
        assert stats.used_bytes == sum(RECORD_BYTES[name.group] for name in held.values()) <= CAPACITY
        assert stats.entries == len(self.readable)
        assert stats.reserved_entries == len(self.reserved)
        assert stats.leased_entries == len({slot for lease in self.leases for slot in lease.slots})

    def teardown(self) -> None:
        for lease in self.leases:
            self.index.release(lease)
        for slot in self.reserved:
            self.index.abort(slot)
        self.index.clear()
        assert self.index.stats.used_bytes == 0
        dropped = self.index.take_drops()
        assert len(dropped) == len(set(dropped))
        assert set(dropped) == set(self.reserved) | set(self.readable)


TestIndexAgainstModel = IndexAgainstModel.TestCase
TestIndexAgainstModel.settings = settings(settings(), max_examples=max(200, settings().max_examples))

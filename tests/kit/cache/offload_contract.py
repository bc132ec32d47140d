"""The contract of every `OffloadCache`. A test file gives the fixture `cache`, on the geometry HYBRID, and inherits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.cache import AcquireOutcome, Ask, Publication, ReservedSlots
from tests.kit.cache.cache_model import HYBRID, block_hashes, make_chain, record_pattern

BLOCKS = 16
CHAIN = make_chain(1, BLOCKS)
TOKENS = BLOCKS * HYBRID.hash_block_size


def names_of(group: int, chain: bytes = CHAIN) -> bytes:
    return b"".join(block_hashes(chain, HYBRID, group))


def pattern(group: int, name: bytes, shard: int) -> npt.NDArray[np.uint8]:
    return record_pattern((0, group), name, shard, HYBRID.groups[group].record_bytes)


def write(cache: Any, slots: ReservedSlots, names: bytes, shard: int) -> None:
    """Writes what a worker's copies write."""
    size = HYBRID.groups[slots.group].record_bytes
    memory = cache.memory(slots.memory_id)
    for at, address in enumerate(slots.addresses.tolist()):
        if slots.tickets[at]:
            name = names[32 * at : 32 * at + 32]
            memory.view(address + shard * size, size)[:] = pattern(slots.group, name, shard)


def has_patterns(cache: Any, memory_id: int, group: int, addresses: npt.NDArray[np.uint64], names: bytes) -> bool:
    size = HYBRID.groups[group].record_bytes
    memory = cache.memory(memory_id)
    return all(
        np.array_equal(memory.view(address + shard * size, size), pattern(group, names[32 * at : 32 * at + 32], shard))
        for at, address in enumerate(addresses.tolist())
        for shard in range(HYBRID.groups[group].shards)
    )


def save(cache: Any, chain: bytes = CHAIN, **publish: Any) -> None:
    """Saves all groups' blocks, by all shards; they are readable when it returns."""
    prefix = names_of(0, chain)
    for group, settings in enumerate(HYBRID.groups):
        names = names_of(group, chain)
        slots = cache.reserve(group, hashes=names)
        assert len(slots) == len(names) // 32
        parents = (bytes(32) + prefix)[: len(prefix)] if group == 0 else names
        for shard in range(settings.shards):
            write(cache, slots, names, shard)
            cache.publish(Publication(slots, hashes=names, parents=parents, shard=shard, **publish))
    cache.stats()


class OffloadCacheContract:
    """Inherit, and give `cache`."""

    def test_at_first_there_is_nothing(self, cache: Any) -> None:
        assert not cache.lookup(0, CHAIN).any()
        assert cache.find_boundary(Ask(CHAIN, local=32)) == 32
        found = cache.acquire(Ask(CHAIN, local=32))
        assert (found.outcome, found.boundary, found.lease, found.is_hit) == (AcquireOutcome.MISS, 32, None, False)
        assert not (cache.acquire_entries(1, names_of(1))).is_hit

    def test_what_is_saved_is_found(self, cache: Any) -> None:
        save(cache)
        assert all(cache.lookup(group, names_of(group)).all() for group in range(len(HYBRID.groups)))
        assert cache.find_boundary(Ask(CHAIN)) == TOKENS
        found = cache.acquire(Ask(CHAIN))
        assert (found.outcome, found.boundary) == (AcquireOutcome.HIT, TOKENS)
        assert (cache.stats()).leases == 1
        for number, group in enumerate(found.groups):
            assert len(group.addresses)
            names = names_of(number)[32 * group.first :]
            assert has_patterns(cache, found.lease.memory_id, number, group.addresses, names)
        cache.release(found.lease)
        assert (cache.stats()).leases == 0

    def test_digests_come_by_shard(self, cache: Any) -> None:
        save(cache)
        plain = cache.acquire(Ask(CHAIN))
        both, second = (
            cache.acquire(Ask(CHAIN, shards=(0, 1))),
            cache.acquire_entries(0, CHAIN, shards=(1,)),
        )
        blocks = len(both.groups[0].addresses)
        assert plain.groups[0].digests.shape == (0, blocks)
        assert both.groups[0].digests.shape == (2, blocks)
        assert both.groups[0].digests.all()
        assert (both.groups[0].digests[0] != both.groups[0].digests[1]).all()
        assert np.array_equal(second.groups[0].digests, both.groups[0].digests[1:])
        for found in (plain, both, second):
            cache.release(found.lease)

    def test_a_load_goes_from_what_the_engine_has_to_where_it_may(self, cache: Any) -> None:
        save(cache)
        found = cache.acquire(Ask(CHAIN, local=64, limit=200, alignment=64))
        assert (found.is_hit, found.boundary) == (True, 192)
        assert found.groups[0].first == 4
        assert len(found.groups[0].addresses) == 8
        cache.release(found.lease)
        assert not (cache.acquire(Ask(CHAIN, local=TOKENS))).is_hit

    def test_a_block_is_there_when_all_its_shards_are(self, cache: Any) -> None:
        slots = cache.reserve(0, hashes=CHAIN)
        write(cache, slots, CHAIN, 1)
        cache.publish(Publication(slots, hashes=CHAIN, shard=1))
        assert (cache.stats()).reserved == BLOCKS
        assert not cache.lookup(0, CHAIN).any()
        write(cache, slots, CHAIN, 0)
        cache.publish(Publication(slots, hashes=CHAIN, shard=0))
        assert (cache.stats()).reserved == 0
        assert cache.lookup(0, CHAIN).all()

    def test_all_shards_may_be_published_at_once(self, cache: Any) -> None:
        slots = cache.reserve(0, hashes=CHAIN)
        for shard in (0, 1):
            write(cache, slots, CHAIN, shard)
        cache.publish(Publication(slots, hashes=CHAIN, shards=2))
        assert (cache.stats()).reserved == 0
        assert cache.lookup(0, CHAIN).all()
        found = cache.acquire_entries(0, CHAIN, shards=(0, 1))
        assert found.groups[0].digests.all()
        cache.release(found.lease)

    def test_a_publish_may_name_the_tenant_that_pays(self, cache: Any) -> None:
        """The session may name some tenants. For any other name `own` pays."""

        def used() -> dict[str, int]:
            return {tenant.name: tenant.used_bytes for tenant in (cache.stats()).tenants}

        before = used()
        save(cache, tenant="other")
        between = used()
        assert between["other"] > before["other"]
        assert between["own"] == before["own"]
        save(cache, make_chain(9, BLOCKS), tenant="nobody that is known")
        after = used()
        assert after["other"] == between["other"]
        assert after["own"] - between["own"] == between["other"] - before["other"]

    def test_what_is_there_needs_no_slot(self, cache: Any) -> None:
        save(cache)
        longer = make_chain(1, BLOCKS + 3)
        slots = cache.reserve(0, hashes=longer)
        assert (slots.tickets != 0).tolist() == [False] * BLOCKS + [True] * 3
        assert len(slots[slots.tickets != 0]) == 3
        cache.abort(slots)
        assert (cache.stats()).reserved == 0

    def test_slots_can_be_had_before_their_names(self, cache: Any) -> None:
        slots = cache.reserve(0, count=5)
        assert len(slots) == 5
        assert slots.tickets.all()
        names = CHAIN[: 32 * 3]
        for shard in range(2):
            write(cache, slots[:3], names, shard)
            cache.publish(Publication(slots[:3], hashes=names, shard=shard))
        cache.abort(slots[3:])
        assert (cache.stats()).reserved == 0
        assert cache.lookup(0, CHAIN).sum() == 3

    def test_entries_are_leased_all_or_none(self, cache: Any) -> None:
        save(cache)
        found = cache.acquire_entries(2, names_of(2))
        assert found.is_hit
        assert [len(group.addresses) for group in found.groups] == [len(names_of(2)) // 32]
        assert has_patterns(cache, found.lease.memory_id, 2, found.groups[0].addresses, names_of(2))
        assert not (cache.acquire_entries(2, names_of(2) + bytes(32))).is_hit
        cache.release(found.lease)

    def test_a_lease_outlives_what_it_was_found_by(self, cache: Any) -> None:
        save(cache)
        found = cache.acquire_entries(0, CHAIN)
        cache.invalidate(0, CHAIN)
        assert (cache.stats()).quarantined == BLOCKS
        assert not cache.lookup(0, CHAIN).any()
        assert has_patterns(cache, found.lease.memory_id, 0, found.groups[0].addresses, CHAIN)
        cache.release(found.lease)
        assert (cache.stats()).quarantined == 0

    def test_what_is_not_ours_is_ignored(self, cache: Any) -> None:
        save(cache)
        found = cache.acquire(Ask(CHAIN))
        cache.release(replace(found.lease, number=found.lease.number + (1 << 32)))
        cache.release(replace(found.lease, memory_id=found.lease.memory_id + 1))
        assert (cache.stats()).leases == 1
        slots = cache.reserve(0, count=2)
        other = replace(slots, memory_id=slots.memory_id + 1)
        assert not cache.publish(Publication(other, hashes=bytes(64)))
        cache.abort(other)
        assert (cache.stats()).reserved == 2
        cache.release(found.lease)
        cache.release(found.lease)
        cache.abort(slots)
        cache.abort(slots)
        stats = cache.stats()
        assert (stats.leases, stats.reserved) == (0, 0)

    def test_only_what_waits_for_this_process_may_be_copied(self, cache: Any) -> None:
        save(cache)
        found, slots = cache.acquire(Ask(CHAIN)), cache.reserve(0, count=1)
        for held in (found.lease, slots):
            assert cache.may_copy(held)
            assert not cache.may_copy(replace(held, session=held.session + 1))
            assert not cache.may_copy(replace(held, memory_id=held.memory_id + 1))
        cache.release(found.lease)
        cache.abort(slots)

    def test_a_memory_that_is_not_mapped_has_no_slots(self, cache: Any) -> None:
        assert cache.memory(cache.memory_id).size_bytes > 0
        with pytest.raises(ValueError, match="not mapped here"):
            cache.memory(cache.memory_id + 1)

    @pytest.mark.parametrize("call", ["lookup", "acquire_entries", "reserve", "invalidate"])
    def test_a_group_that_does_not_exist_is_an_error(self, cache: Any, call: str) -> None:
        with pytest.raises(ValueError, match="group"):
            getattr(cache, call)(3, hashes=CHAIN)

    def test_hashes_of_a_wrong_length_are_an_error(self, cache: Any) -> None:
        with pytest.raises(ValueError, match="32"):
            cache.lookup(0, CHAIN[:-1])
        with pytest.raises(ValueError, match="32"):
            cache.acquire(Ask(CHAIN[:-1]))
        with pytest.raises(ValueError, match="32"):
            cache.invalidate(0, CHAIN[:-1])

"""A small cache with a tier below it, an engine that saves to it, and a clock that a test moves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from kvoffload.cache import Ask, CacheGeometry, LocalCache, StoredBlocks
from kvoffload.protocol import Promote, Promoted
from kvoffload.server.common.steps import Unfinished
from kvoffload.server.tiering.chain import TierChain
from kvoffload.server.tiering.settings import TierSettings
from kvoffload.server.tiering.traffic import TierTraffic
from kvoffload.tiers import Tier
from tests.kit.cache.cache_model import HYBRID, SMALL, block_hashes, fingerprint, make_chain, record_pattern
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.memory_tier import MemoryTier

NO_PARENT = bytes(32)


class TierSetting:
    """A memory with a slower tier. `faults`: by verb and place in a batch, how that record ends."""

    cache_settings = SMALL

    def __init__(self, geometry: CacheGeometry = HYBRID, tier: Tier | None = None, **settings: Any) -> None:
        self.faults: dict[tuple[str, int], Any] = {}
        self.geometry = geometry
        self.cache = LocalCache.create(self.cache_settings)
        self.tier = FaultyTier(tier or MemoryTier(), lambda verb, place: self.faults.get((verb, place)))
        self.traffic = TierTraffic(self.tier, TierSettings(**settings), open_pidfd=lambda: os.pidfd_open(os.getpid()))  # type: ignore[arg-type]
        self.chain = TierChain([self.traffic, *(self.open_farther())])
        self.told: list[tuple[int, bytes]] = []
        self.now_s = 100.0
        self.chain.attach(self.cache, lambda _, stored: self.told.append((stored.group, stored.hashes)))
        self.name_space = self.cache.open_namespace(fingerprint("model"), geometry)
        self.chain.learn(self.name_space, fingerprint("model"), geometry)
        self.session = self.cache.open_session()
        self.cache.add_process(self.session, pid=os.getpid())

    def close(self) -> None:
        self.tier.is_held = False
        self.chain.close(lambda: self.now_s)
        self.cache.close()

    def open_farther(self) -> list[TierTraffic]:
        """Below the first one."""
        return []

    # ---- an engine ----

    def save(self, chain: bytes) -> None:
        """All blocks of a prompt, as an engine saves them, and the server hears of them."""
        for group, settings in enumerate(self.geometry.groups):
            names = block_hashes(chain, self.geometry, group)
            hashes = b"".join(names)
            slots = self.cache.reserve(self.session, self.name_space, group, count=len(names))
            for shard in range(settings.shards):
                for name, address in zip(names, slots.addresses.tolist(), strict=True):
                    record = self.pattern(group, name, shard)
                    self.cache.view(address + shard * settings.record_bytes, settings.record_bytes)[:] = record
                parents = NO_PARENT + hashes[:-32] if group == 0 else bytes(len(hashes))
                self.cache.commit(
                    self.session,
                    self.name_space,
                    group,
                    slots.tickets,
                    hashes=hashes,
                    parents=parents,
                    shard=shard,
                )
            self.chain.note_stored(self.name_space, StoredBlocks(group, hashes, NO_PARENT + hashes[:-32]))

    def pattern(self, group: int, name: bytes, shard: int) -> Any:
        return record_pattern((0, group), name, shard, self.geometry.groups[group].record_bytes)

    def load(self, chain: bytes, *, local: int = 0) -> int:
        """The boundary of a hit, of which every byte was looked at."""
        found = self.cache.acquire(self.session, self.name_space, Ask(chain, local=local))
        for group, leased in enumerate(found.groups):
            names = block_hashes(chain, self.geometry, group)[leased.first :]
            settings = self.geometry.groups[group]
            for name, address in zip(names, leased.addresses.tolist(), strict=False):
                for shard in range(settings.shards):
                    record = self.cache.view(address + shard * settings.record_bytes, settings.record_bytes)
                    np.testing.assert_array_equal(record, self.pattern(group, name, shard))
        self.cache.release(self.session, found.lease)
        return found.boundary

    def ask(self, chain: bytes, *, wait_ms: int = 1000, **more: Any) -> list[Promoted]:
        """Asks for a promotion. Returns the list into which the answer comes."""
        answers: list[Promoted] = []
        message = Promote(name_space=self.name_space, chain=chain, wait_ms=wait_ms, **more)
        find = self.chain.serve(message, self.now_s, answers.append)
        if find is not None:
            # As the thread for long calls does, and then the core.
            while isinstance(found := find(), Unfinished):
                pass
            assert callable(found)
            assert found() is None
        return answers

    # ---- time ----

    def turn(self, seconds: float = 0.001, times: int = 4) -> None:
        """Turns as the server's loop does."""
        for _ in range(times):
            self.now_s += seconds
            self.chain.advance(self.now_s)

    def save_below(self, chain: bytes) -> None:
        """It is in the tier, and not in memory."""
        self.save(chain)
        self.turn(times=64)
        assert self.traffic.is_idle
        self.cache.clear(self.name_space)

    @property
    def held_bytes(self) -> int:
        """Returns what the traffic itself holds."""
        return self.cache.stats.leases + self.cache.stats.reserved


@contextmanager
def tier_setting(geometry: CacheGeometry = HYBRID, tier: Tier | None = None, **settings: Any) -> Iterator[TierSetting]:
    """Makes a setting, at whose end nothing is held."""
    setting = TierSetting(geometry, tier, **settings)
    try:
        yield setting
        setting.tier.is_held = False
        setting.tier.takes = None
        setting.turn(times=8)
        setting.turn(seconds=20.0)
        assert setting.held_bytes == 0
    finally:
        setting.close()


CHAIN = make_chain(1, 16)
"""256 tokens: 16 blocks of attention, 8 of a window, 4 states."""

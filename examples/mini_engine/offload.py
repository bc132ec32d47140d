"""What the engine asks of kvoffload: register its memory, save full blocks, restore them, let go of the memory."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import torch
from torch import Tensor

from kvoffload.cache import EntryKey
from kvoffload.errors import RegistrationError
from kvoffload.kvspec import PageMap, Registration, run_self_test
from kvoffload.transfer import PlainCopy
from mini_engine.kv_cache import KVCache


class BlockStore:
    """Records of full blocks in host memory. They outlive a registration; a cache of another kind drops them."""

    def __init__(self) -> None:
        self.records: dict[EntryKey, Tensor] = {}
        self.registration = Registration()
        self._description: object = None

    def register(self, cache: KVCache) -> None:
        """The caller promises that every block is free: one of each group is tested."""
        geometry, registration = cache.geometry, self.registration
        self._record_bytes = [group.record_bytes for group in geometry.groups]
        registration.register(geometry, cache.tensors, scale_views=cache.scale_views, self_test=self._test_last_block)
        self._copy = PlainCopy(registration.page_map, registration.memory)
        registration.attach(self._copy)
        if self._description != geometry.describe():
            self._description = geometry.describe()
            self.records.clear()

    def unregister(self) -> None:
        held = self.registration.unregister()
        if held:
            raise RegistrationError(f"allocation {held[0]} is still held", remedy="attach whatever holds it")

    def save(self, key: EntryKey, block: int) -> None:
        if key not in self.records:
            self.records[key] = self._save(key.group, block)

    def load(self, key: EntryKey, block: int) -> None:
        self._load(key.group, block, self.records[key])

    def _save(self, group: int, block: int) -> Tensor:
        record = torch.empty(1, self._record_bytes[group], dtype=torch.uint8)
        self._copy.save(group, [block], record)
        return record

    def _load(self, group: int, block: int, record: Tensor) -> None:
        self._copy.load(group, [block], record)

    def _test_last_block(self, page_map: PageMap, memory: Mapping[str, Tensor]) -> None:
        blocks = dict.fromkeys(range(len(page_map.groups)), page_map.num_blocks - 1)
        with closing(PlainCopy(page_map, memory)) as self._copy:
            run_self_test(page_map, memory, free_blocks=blocks, save=self._save, load=self._load)

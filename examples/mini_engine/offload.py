"""The engine's calls to kvoffload: register its memory, save full blocks, restore them, let go of the memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kvoffload.cache import EntryKey
from kvoffload.errors import RegistrationError
from kvoffload.kvspec import PageMap, Registration
from kvoffload.transfer import (
    CopyDirection,
    CopyEngine,
    CopyItems,
    compute_stream,
    open_engine,
    run_copy_self_test,
)
from mini_engine.kv_cache import KVCache

TIMEOUT_S = 60.0


NO_PARENT = bytes(32)


class Move(NamedTuple):
    """A full block of the engine, the name of what it holds, and of the block before it."""

    key: EntryKey
    block: int
    parent: bytes = NO_PARENT


class CopyError(RuntimeError):
    """A copy failed, or does not end."""


class Registrar:
    """The engine's memory, and copies from and to it."""

    def __init__(self) -> None:
        self.registration = Registration()

    def register(self, cache: KVCache) -> None:
        """The caller promises that every block is free: one of each group is tested."""
        geometry, registration = cache.geometry, self.registration
        self.record_bytes = [group.record_bytes for group in geometry.groups]
        self._device = next(iter(cache.allocations.values())).device
        registration.register(geometry, cache.tensors, scale_views=cache.scale_views, self_test=self._open_tested)
        registration.attach(self._engine)

    def note_prompt(self, chain: bytes, tokens: int, *, local: int, boundary: int, saved_s: float) -> None:
        """A prompt goes on at `boundary`; the engine's own cache alone would have reached `local`, and computing what
        lies between would have taken `saved_s`."""

    def unregister(self) -> None:
        held = self.registration.unregister()
        if held:
            raise RegistrationError(f"allocation {held[0]} is still held", remedy="attach whatever holds it")

    def wait(self) -> None:
        """Waits until every copy has ended. CopyError: a copy failed."""
        if not self._engine.fence(TIMEOUT_S):
            raise CopyError(f"copies do not end within {TIMEOUT_S:.0f} s")
        for finished in self._engine.poll():
            if finished.fault:
                raise CopyError(finished.fault)

    def submit(self, direction: CopyDirection, moves: Sequence[Move], slots: Sequence[int]) -> None:
        """One plan. What the engine has computed so far comes before it; plans that share bytes keep their order."""
        items = CopyItems(
            group=np.array([move.key.group for move in moves], np.int64),
            block=np.array([move.block for move in moves], np.int64),
            slot=np.array(slots, np.uint64),
        )
        self._engine.submit(direction, items, after=compute_stream(self._device))

    def _open_tested(self, page_map: PageMap, memory: Mapping[str, Tensor]) -> None:
        self._engine: CopyEngine = open_engine(page_map, memory)
        blocks = dict.fromkeys(range(len(page_map.groups)), page_map.num_blocks - 1)
        try:
            run_copy_self_test(self._engine, page_map, memory, free_blocks=blocks, after=compute_stream(self._device))
        except BaseException:
            self._engine.close()
            raise


class BlockStore(Registrar):
    """Records of full blocks in this process. They outlive a registration; a cache of another kind drops them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: dict[EntryKey, Tensor] = {}
        """Records by name. Call `wait` before reading their bytes."""
        self._description: object = None

    def register(self, cache: KVCache) -> None:
        super().register(cache)
        if self._description != cache.geometry.describe():
            self._description = cache.geometry.describe()
            self.records.clear()

    def bring_up(self, chain: bytes) -> None:
        """A request with these blocks has come: what lies below memory is wanted there. Here nothing does."""

    def has(self, key: EntryKey) -> bool:
        return key in self.records

    def hold(self, keys: Sequence[EntryKey]) -> bool:
        """Whether all of them can be loaded, until `load` or `let_go`."""
        return all(key in self.records for key in keys)

    def let_go(self) -> None:
        """Gives up the hit that is held, which is not loaded after all."""

    def save(self, moves: Sequence[Move]) -> None:
        """Begins to save what is not there yet. The blocks keep their bytes until `wait` has returned."""
        new = {move.key: move for move in moves if move.key not in self.records}
        for key in new:
            self.records[key] = torch.empty(self.record_bytes[key.group], dtype=torch.uint8)
        self.submit(CopyDirection.SAVE, list(new.values()), [self.records[key].data_ptr() for key in new])

    def load(self, moves: Sequence[Move]) -> None:
        """All of them are there when it returns."""
        self.submit(CopyDirection.LOAD, moves, [self.records[move.key].data_ptr() for move in moves])
        self.wait()

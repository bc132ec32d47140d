"""The two memories that a schedule may run on, and who makes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from tests.simulation.model_memory import ModelCache, ModelMemory
from tests.simulation.real_memory import RealCache, RealMemory, Sleepers

AnyMemory: TypeAlias = ModelMemory | RealMemory
AnyCache: TypeAlias = ModelCache | RealCache


class ModelMaker:
    """Makes memory in plain Python: a thousand times as many schedules."""

    def __init__(self, slots: int, has_exited: Callable[[int], bool]) -> None:
        self._slots = slots
        self._has_exited = has_exited

    def create(self, number: int) -> ModelCache:
        return ModelCache(ModelMemory(number, self._slots), self._has_exited)

    def adopt(self, memory: AnyMemory) -> ModelCache:
        assert isinstance(memory, ModelMemory)
        return ModelCache.adopt(memory, self._has_exited)

    def exit_process(self, pid: int) -> None:
        pass

    def close(self) -> None:
        pass


class RealMaker:
    """The native cache, with real processes."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._sleepers = Sleepers()
        self._caches: list[RealCache] = []

    def create(self, number: int) -> RealCache:
        self._caches.append(RealCache.make(number, self._shards, self._sleepers))
        return self._caches[-1]

    def adopt(self, memory: AnyMemory) -> RealCache:
        assert isinstance(memory, RealMemory)
        self._caches.append(RealCache.take_over(memory, self._sleepers))
        return self._caches[-1]

    def exit_process(self, pid: int) -> None:
        self._sleepers.end(pid)

    def close(self) -> None:
        self._sleepers.close()
        for cache in self._caches:
            cache.close()
        for memory in {cache.memory for cache in self._caches}:
            memory.close()

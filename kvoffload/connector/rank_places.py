"""Where every rank of the engine may copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvoffload.connector.step_plan import Place


class RankPlaces:
    """Owned by the scheduler's thread. A hit is reported, and a slot used, only where all ranks are."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._by_rank: dict[int, tuple[Place, ...]] = {}
        self._everywhere: frozenset[Place] = frozenset()

    def note(self, places: Mapping[int, Sequence[Place]]) -> None:
        """What ranks have said, each of all its places."""
        if places:
            self._by_rank.update({rank: tuple(Place(*place) for place in mine) for rank, mine in places.items()})
            common = [frozenset(mine) for mine in self._by_rank.values()]
            self._everywhere = frozenset.intersection(*common) if len(common) == self._ranks else frozenset()

    @property
    def are_all_known(self) -> bool:
        """Every rank has said that it may copy somewhere."""
        return len(self._by_rank) == self._ranks and all(self._by_rank.values())

    def has_all(self, place: Place) -> bool:
        return place in self._everywhere

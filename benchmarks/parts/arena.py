"""How much of the segments do a hybrid model's records use, while their sizes come and go?"""

from __future__ import annotations

from collections.abc import Iterator

from kvoffload import native
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.cache.settings import DEFAULT_POLICY
from kvoffload.errors import BenchmarkError
from kvoffload.units import GIB, format_size

POOL_BYTES = 16 * GIB
LEAST_POOL_BYTES = GIB
SEGMENT_BYTES = GIB
LEFT_TO_OTHERS = GIB
RECORD_BYTES = (4096, 36 << 10, 700 << 10, 1_363_186, 24 << 20)
BYTE_SHARES = (0.05, 0.10, 0.20, 0.25, 0.40)
PHASES = (("one mix", 20, 0.97), ("mix flipped", 5, 0.95))


class ArenaBenchmark:
    """A whole cache with real memory, in turnovers of its pool: records of five sizes are stored, used again at random,
    and evicted in the policy's order; then the sizes' shares of the bytes are reversed. The limit is every byte of the
    segments; what is measured is seen after every record of the last turnover of each phase."""

    name = "arena"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """A line for the mean and one for the lowest use, per phase and policy."""
        pool_bytes = choose_pool_bytes(native.memory_headroom_bytes())
        for policy in dict.fromkeys((DEFAULT_POLICY, "lru")):
            progress(f"{format_size(pool_bytes)}, policy {policy}")
            load = make_load(pool_bytes, policy)
            for phase, turnovers, goal in PHASES:
                progress(f"{format_size(pool_bytes)}, policy {policy}, {phase}: {turnovers} turnovers")
                yield from self._measure(load, phase, turnovers, goal, {"policy": policy, "pool_gib": pool_bytes / GIB})
                load.flip()
            del load

    def _measure(
        self, load: native.TurnoverLoad, phase: str, turnovers: int, goal: float, params: dict[str, int | float | str]
    ) -> Iterator[Result]:
        _, _, _, admitted_before, moved_before, refused_before, seconds_before = load.run(turnovers - 1)
        mean, lowest, _, admitted, moved, refused, seconds = load.run(1)
        for seen, usage in (("mean", mean), ("lowest", lowest)):
            yield Result(
                name=self.name,
                value=usage,
                unit="of the segments",
                limit=1.0,
                spread=0.0,
                goal=Goal(Measure.VALUE, Bound.AT_LEAST, goal),
                params={
                    "seen": seen,
                    "phase": phase,
                    "turnovers": turnovers,
                    **params,
                    "moved_share": round((moved_before + moved) / (admitted_before + admitted), 4),
                    "refused": refused_before + refused,
                    "seconds": round(seconds_before + seconds, 1),
                },
            )


def choose_pool_bytes(headroom_bytes: int) -> int:
    """Returns the pool's size of the goals, or the largest power of two that fits. BenchmarkError: that is too
    little."""
    pool_bytes = POOL_BYTES
    while pool_bytes + LEFT_TO_OTHERS > headroom_bytes and pool_bytes >= LEAST_POOL_BYTES:
        pool_bytes //= 2
    if pool_bytes < LEAST_POOL_BYTES:
        raise BenchmarkError(
            f"a pool of {format_size(LEAST_POOL_BYTES)} does not fit into {format_size(headroom_bytes)} of memory",
            remedy="run on a machine with more memory",
        )
    return pool_bytes


def make_load(pool_bytes: int, policy: str) -> native.TurnoverLoad:
    """An empty cache with all its memory. Raises BenchmarkError if others have taken it meanwhile."""
    try:
        return native.make_turnover_load(
            pool_bytes=pool_bytes,
            segment_bytes=SEGMENT_BYTES,
            record_bytes=list(RECORD_BYTES),
            byte_shares=list(BYTE_SHARES),
            policy=policy,
            threads=2,
        )
    except RuntimeError as fault:
        raise BenchmarkError(f"a pool of {format_size(pool_bytes)} cannot be had: {fault}") from fault

"""The slower tiers of a domain, the nearest first: what one of them lacks is asked of the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CacheGeometry, LocalCache, StoredBlocks, find_reach, needed_blocks
from kvoffload.errors import TierError
from kvoffload.hash_rows import Rows
from kvoffload.protocol import Prefetch, Promote, Promoted, PromotionOutcome, TierReach
from kvoffload.server.common.steps import Find, Steps
from kvoffload.server.tiering.looks import Found
from kvoffload.server.tiering.promotion import OnStored
from kvoffload.server.tiering.promotion_parts import Answer, AskedFor, Keep, PartOf, Wanted
from kvoffload.server.tiering.seen import LOOKS_AT_ONCE, Seen, bound_tokens, count_looks, look_for, serve_in_parts
from kvoffload.server.tiering.settings import TierPlan, TierSpace
from kvoffload.server.tiering.tier_notes import TierNotes
from kvoffload.server.tiering.traffic import PREFETCH_WAIT_MS, TierTraffic
from kvoffload.tiers import RecordNames, Tier
from kvoffload.tiers.remote import RemoteTier

MAX_NEEDED = 32_768
"""Number of blocks for which one request waits at most: those that come up, and those that are kept for it. A longer
one gets its beginning."""


def open_chains(plans: Mapping[str, Sequence[TierPlan]], *, open_pidfd: Callable[[], int]) -> dict[str, TierChain]:
    """Opens the tiers of each domain that has some. `open_pidfd` opens a pidfd of the process that owns the slots of
    what is under way."""
    return {
        name: TierChain([TierTraffic(_open_tier(tier), tier.settings, open_pidfd=open_pidfd) for tier in below])
        for name, below in plans.items()
        if below
    }


def _open_tier(plan: TierPlan) -> Tier:
    tier, keys = plan.place.open_tier(), plan.settings.seal_keys
    if keys is not None:
        if not isinstance(tier, RemoteTier):
            tier.close()
            raise TierError(f"{plan.place.describe()}: records cannot be sealed there", remedy="make it a RemoteTier")
        tier.seal_with(keys)
    return tier


@dataclass(eq=False)
class _Walk:
    """One request's walk from tier to tier, with what each has of what those before it lack."""

    asked: AskedFor
    answer: Answer
    lacking: Found
    found: list[Found] = field(default_factory=list)
    left_out: set[int] = field(default_factory=set)
    """Numbers of the tiers that are too slow for it: the others are asked as if these were not there."""
    reach: int = 0
    """The boundary that all tiers together would have reached."""


@dataclass(frozen=True, eq=False)
class _Plan:
    """The part that each tier brings so that a hit reaches `boundary`. `kept` is in memory already."""

    boundary: int
    parts: Mapping[int, Sequence[npt.NDArray[np.int64]]]
    kept: Sequence[npt.NDArray[np.int64]]
    reaches: tuple[TierReach, ...]


@dataclass(eq=False)
class _Join:
    """The parts that one request waits for."""

    answer: Answer
    boundary: int
    reaches: tuple[TierReach, ...]
    waits_for: int
    is_partly: bool = False

    def end_part(self, promoted: Promoted) -> None:
        self.is_partly |= promoted.outcome is not PromotionOutcome.COMPLETE
        self.waits_for -= 1
        if not self.waits_for:
            outcome = PromotionOutcome.PARTLY if self.is_partly else PromotionOutcome.COMPLETE
            self.answer(Promoted(outcome=outcome, boundary=self.boundary, reaches=self.reaches))


class TierChain:
    """Belongs to the thread of the server's core. Nothing here waits but `close`."""

    def __init__(self, tiers: Sequence[TierTraffic]) -> None:
        self.tiers = tuple(tiers)
        self._notes = TierNotes(self.tiers)
        self._cache: LocalCache | None = None
        self._is_closing = False

    def attach(self, cache: LocalCache, tell: OnStored) -> None:
        """Connects the memory. `tell` is called with blocks that came up, and so are the tiers above the one they came
        from."""
        self._cache = cache
        for at, tier in enumerate(self.tiers):
            above = self.tiers[:at]

            def came_up(space: TierSpace, stored: StoredBlocks, above: Sequence[TierTraffic] = above) -> None:
                tell(space, stored)
                for nearer in above:
                    nearer.note_stored(space.number, stored)

            tier.attach(cache, came_up)

    def learn(self, name_space: int, fingerprint: bytes, geometry: CacheGeometry) -> None:
        """Notes an identity whose blocks may be moved from here on."""
        for tier in self.tiers:
            tier.learn(name_space, fingerprint, geometry)

    def forget_spaces(self, name_spaces: Set[int]) -> set[int]:
        """Forgets identities that no session registers any more and that have no blocks in memory. Returns those that
        were forgotten: all but those for which a tier has something to do."""
        spaces = [space for number in name_spaces if (space := self.tiers[0].find_space(number)) is not None]
        forgotten = set(name_spaces)
        for tier in self.tiers:
            forgotten = tier.forget_spaces(forgotten)
        for space in spaces:
            if space.number not in forgotten:
                self.learn(space.number, space.fingerprint, space.geometry)
        return forgotten

    def files(self) -> list[int]:
        """Returns descriptors that are readable when `advance` may have something to do."""
        return [tier.fileno() for tier in self.tiers]

    def next_s(self) -> float | None:
        """Returns the latest time at which `advance` has something to do."""
        times = [tier.next_s() for tier in self.tiers]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def note_stored(self, name_space: int, stored: StoredBlocks) -> None:
        """Notes that an engine's blocks can be read in memory from now on."""
        for tier in self.tiers:
            tier.note_stored(name_space, stored)

    def forget(self, name_space: int, group: int, hashes: bytes) -> None:
        """Removes blocks that must not be trusted, wherever they are."""
        for tier in self.tiers:
            tier.forget(name_space, group, hashes)
        if self._cache is not None:
            # They may have come up after the caller took them out of memory.
            self._cache.leave_invalidate(name_space, group, hashes)

    def look_for(self, space: TierSpace, rows: Sequence[Rows], *, is_memory_asked: bool = True) -> Steps[Seen]:
        """Looks for the blocks of a request in the tiers that need not be asked: for those that memory lacks, or for
        all. From any thread."""
        tiers = {at: tier.find_near for at, tier in enumerate(self.tiers) if tier.knows_all}
        return look_for(self._cache if is_memory_asked else None, space, rows, tiers)

    def serve(self, message: Promote, now_s: float, answer: Answer, *, owner: str = "") -> Find | None:
        """Serves a request like `promote`: at once if it is short. Else it returns a callable for the thread for long
        calls."""
        space = self.tiers[0].find_space(message.name_space)
        if self._cache is None or space is None:
            answer(Promoted(outcome=PromotionOutcome.NOTHING, boundary=message.local))
            return None
        rows = space.chain_rows_of(message.chain, min(message.limit, bound_tokens(space)))

        def promote(seen: Seen) -> None:
            end_s = now_s + message.wait_ms / 1000
            self.promote(AskedFor(message, space, rows, end_s, seen, owner), now_s, answer)

        return serve_in_parts(self.look_for(space, rows), promote, looks=count_looks(space, rows))

    def prefetch(self, message: Prefetch, now_s: float, *, owner: str = "") -> Find | None:
        """Brings up blocks for a request with this chain that comes soon, like `serve`."""
        wanted = Promote(
            name_space=message.name_space,
            chain=message.chain,
            local=message.local,
            limit=message.limit,
            wait_ms=PREFETCH_WAIT_MS,
        )
        return self.serve(wanted, now_s, lambda _: None, owner=owner)

    def promote(self, asked: AskedFor, now_s: float, answer: Answer) -> None:
        """Asks all tiers for what memory and those before them lack; then each brings its part, as blocks of one prompt
        may lie anywhere. `answer` is called once: now, or from a later call of this object."""
        if self._is_closing or self.tiers[0].find_space(asked.space.number) is None:
            answer(Promoted(outcome=PromotionOutcome.NOTHING, boundary=asked.message.local))
            return
        self._find(_Walk(asked, answer, [~there for there in asked.seen.in_memory]), now_s)

    def find_places(
        self,
        space: TierSpace,
        rows: list[Rows],
        seen: Seen,
        *,
        now_s: float,
        wait_s: float,
        then: Callable[[list[Found | None]], None],
    ) -> None:
        """Finds which tiers have the blocks that memory lacks: for each tier a list by group, or None for a tier that
        would have to be asked when `wait_s` is 0. `then` is called once: now, or from a later call of this object."""
        if self.tiers[0].find_space(space.number) is None or self._is_closing:
            then([])
            return
        message = Promote(name_space=space.number, chain=b"", limit=0, wait_ms=0)
        asked = AskedFor(message, space, rows, now_s + wait_s, seen)
        lacking = [~there for there in seen.in_memory]
        found: dict[int, Found | None] = {}

        def note(at: int, what: Found | None, _found_s: float) -> None:
            found[at] = what
            if len(found) == len(self.tiers):
                then([found[at] for at in range(len(self.tiers))])

        for at, tier in enumerate(self.tiers):
            if at in seen.in_tiers or wait_s > 0:
                tier.reads.find(asked, lacking, now_s, partial(note, at), known=seen.in_tiers.get(at))
            else:
                note(at, None, now_s)

    def find_near(self, names: RecordNames) -> npt.NDArray[np.bool_]:
        """Returns which of these records are in tiers, as far as these know without asking. From any thread."""
        found = np.zeros(len(names), np.bool_)
        for tier in self.tiers:
            found |= tier.find_near(names)
        return found

    def bring(self, wanted: Wanted, now_s: float) -> None:
        """Brings blocks up from the nearest tier that knows what it has."""
        near = next((tier for tier in self.tiers if tier.knows_all), None)
        if near is None:
            wanted.answer(Promoted(outcome=PromotionOutcome.NOTHING, boundary=0))
        else:
            near.reads.bring(wanted, now_s)

    def advance(self, now_s: float) -> None:
        """Takes finished batches from the tiers, and gives them as much new work as they may have."""
        for tier in self.tiers:
            tier.advance(now_s)

    def look(self) -> None:
        """Does the tiers' periodic work, and notes in memory which blocks they have. The event loop calls it."""
        for tier in self.tiers:
            tier.look()
        if self._cache is not None:
            self._notes.sweep(self._cache)

    def close(self, now_s: Callable[[], float], *, until_s: float | None = None) -> None:
        """Closes all tiers, as the server ends. After it no slot of the memory is touched. `until_s`: the memory goes
        with the server, and blocks are handed over until then."""
        self._is_closing = True
        for tier in self.tiers:
            tier.close(now_s, until_s=until_s)

    def _find(self, walk: _Walk, now_s: float) -> None:
        """Asks the next tier."""
        is_last = len(walk.found) == len(self.tiers) or not any(group.any() for group in walk.lacking)
        if is_last or self._is_closing or now_s >= walk.asked.end_s:
            self._choose(walk, now_s)
            return

        def found(what: Found, found_s: float) -> None:
            walk.found.append(what)
            walk.lacking = [lacking & ~has for lacking, has in zip(walk.lacking, what, strict=True)]
            self._find(walk, found_s)

        if len(walk.found) in walk.left_out:
            found([np.zeros_like(group) for group in walk.lacking], now_s)
        else:
            at, seen = len(walk.found), walk.asked.seen
            self.tiers[at].reads.find(walk.asked, walk.lacking, now_s, found, known=seen.in_tiers.get(at))

    def _choose(self, walk: _Walk, now_s: float) -> None:
        """Chooses how far a hit may reach, leaving out tiers through which it would come later than it is computed."""
        cache, asked = self._cache, walk.asked
        message, space = asked.message, asked.space
        assert cache is not None
        groups = range(len(space.rules))
        in_memory = _look_up(cache, asked)
        settings = {"local": message.local, "limit": message.limit, "alignment": message.alignment}
        reached = find_reach(space.rules, in_memory, **settings)
        used = [] if self._is_closing else list(range(len(walk.found)))
        while used:
            there = [in_memory[group].copy() for group in groups]
            for at in used:
                for group in groups:
                    there[group] |= walk.found[at][group]
            boundary = find_reach(space.rules, there, **settings)
            walk.reach = max(walk.reach, boundary)
            needed = [needed_blocks(rule, local=message.local, boundary=boundary) for rule in space.rules]
            while boundary > reached and (count := sum(map(len, needed))) > MAX_NEEDED:
                boundary = find_reach(space.rules, there, **settings | {"limit": boundary * MAX_NEEDED // count})
                needed = [needed_blocks(rule, local=message.local, boundary=boundary) for rule in space.rules]
            if boundary <= reached:
                break
            parts = {at: self._part(walk, at, needed, in_memory) for at in used}
            computing_s = (boundary - reached) * message.prefill_ns / 1e9
            sizes = {at: size for at in used if (size := _size_of(space, parts[at]))}
            slow = {at for at, size in sizes.items() if self.tiers[at].reads.is_too_slow(size, computing_s)}
            if not slow:
                kept = [
                    part.start + np.flatnonzero(is_there[part.start : part.stop])
                    for part, is_there in zip(needed, in_memory, strict=True)
                ]
                reaches, together = [], in_memory
                for at in sizes:
                    together = [known | more for known, more in zip(together, walk.found[at], strict=True)]
                    reach = find_reach(space.rules, together, **settings | {"limit": boundary})
                    reaches.append(TierReach(tier=self.tiers[at].settings.name, boundary=reach))
                self._bring(walk, _Plan(boundary, parts, kept, tuple(reaches)), now_s)
                return
            walk.left_out |= slow
            if now_s < asked.end_s and min(slow) < len(self.tiers) - 1:
                # Tiers behind it were not asked for what it has.
                walk.found, walk.lacking = [], [~there for there in in_memory]
                self._find(walk, now_s)
                return
            used = [at for at in used if at not in slow]
        outcome = PromotionOutcome.TOO_SLOW if walk.left_out else PromotionOutcome.NOTHING
        walk.answer(Promoted(outcome=outcome, boundary=max(walk.reach, reached)))

    def _part(self, walk: _Walk, at: int, needed: Sequence[range], in_memory: Found) -> list[npt.NDArray[np.int64]]:
        """Returns what this tier brings, by group."""
        return [
            part.start + np.flatnonzero((has & ~is_there)[part.start : part.stop])
            for part, has, is_there in zip(needed, walk.found[at], in_memory, strict=True)
        ]

    def _bring(self, walk: _Walk, plan: _Plan, now_s: float) -> None:
        bringing = [at for at, part in plan.parts.items() if any(len(group) for group in part)]
        nothing = [group[:0] for group in plan.kept]
        join = _Join(walk.answer, plan.boundary, plan.reaches, len(bringing))
        keep = Keep(len(bringing), walk.asked.end_s)
        for number, at in enumerate(bringing):
            part = PartOf(plan.boundary, keep, plan.parts[at], nothing if number else plan.kept)
            self.tiers[at].reads.bring_up(walk.asked, part, now_s, join.end_part)


def _look_up(cache: LocalCache, asked: AskedFor) -> Found:
    """Returns which blocks memory has now; of a long request which ones it had when the request came."""
    if count_looks(asked.space, asked.rows) > LOOKS_AT_ONCE:
        return asked.seen.in_memory
    return [cache.lookup(asked.space.number, group, rows.tobytes()) for group, rows in enumerate(asked.rows)]


def _size_of(space: TierSpace, part: Sequence[npt.NDArray[np.int64]]) -> int:
    return sum(len(group) * space.block_bytes(number) for number, group in enumerate(part))

"""Blocks on their way from a slower tier to memory, for requests that wait for them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence, Set

import numpy as np
import numpy.typing as npt

from kvoffload.cache import CommitOutcome, LeaseFor, LeaseId, LocalCache, SessionId, StoredBlocks
from kvoffload.hash_rows import Rows, as_rows, find_first
from kvoffload.metrics.histogram import WAIT_BOUNDS_S, Histogram
from kvoffload.protocol import Promoted, PromotionOutcome
from kvoffload.server.tiering.bad_records import BadRecords
from kvoffload.server.tiering.looks import Found, Then, TierLooks
from kvoffload.server.tiering.promotion_parts import (
    Answer,
    AskedFor,
    Keep,
    PartOf,
    Piece,
    Promotion,
    Room,
    Storing,
    Wanted,
)
from kvoffload.server.tiering.rate import TierRate
from kvoffload.server.tiering.seen import LOOKS_AT_ONCE, count_looks
from kvoffload.server.tiering.settings import FindSpace, TierCounts, TierSettings, TierSpace, as_names, cut_pieces
from kvoffload.tiers import FinishedBatch, RecordOutcome, Tier

_GET_TIMEOUT_S = 10.0
_MOST_PIECES = 8
"""Number of pieces under way. More pieces of small records would take the server's loop for too long at once."""
_LOOK_SHARE = 0.5
"""Share of a request's remaining time for asking a tier what it has, so that others can bring their part in the
rest."""
_TRIED_EVERY = 16
"""Number of requests refused because computing was estimated to be faster, after which an idle tier is tried again: it
may be faster now."""

OnStored = Callable[[TierSpace, StoredBlocks], None]
OnMissing = Callable[[TierSpace, int, bytes], None]
"""Called with blocks of a group."""


class Promotions:
    """Belongs to the thread of the server's core. Nothing here waits."""

    def __init__(
        self,
        tier: Tier,
        settings: TierSettings,
        find_space: FindSpace,
        *,
        counts: TierCounts,
        bad: BadRecords,
        on_stored: OnStored,
    ) -> None:
        """`on_stored` is called with blocks that can be read in memory again."""
        self.rate = TierRate()
        self.waits = Histogram(WAIT_BOUNDS_S)
        """Seconds for which requests waited."""
        self._tier = tier
        self._settings = settings
        self._find_space = find_space
        self._counts = counts
        self._on_stored = on_stored
        self.on_missing: OnMissing = lambda *_: None
        """Called with blocks that the tier was thought to have, and has not."""
        self._bad = bad
        self._cache: LocalCache | None = None
        self.session = SessionId(0)
        self._looks = TierLooks(tier, timeout_s=settings.look_timeout_s)
        self._refused = 0
        """Number of requests refused as too slow since the last trial."""
        self._waiting: set[Promotion] = set()
        self._peers_waiting = 0
        """Number of the waiting requests that are peers'."""
        self._queue: deque[Piece] = deque()
        self._queued_bytes = 0
        self._coming: defaultdict[tuple[int, int], dict[bytes, Piece]] = defaultdict(dict)
        """Pieces that are queued or on their way, by namespace and group, and by block name."""
        self._reading: dict[int, tuple[Piece, int]] = {}
        """Batches that the tier is reading, by its ticket: the piece, and which shard."""
        self._storing: deque[Storing] = deque()
        """Pieces that are being made readable, in this order."""
        self._held: list[tuple[Keep, list[LeaseId]]] = []

    def attach(self, cache: LocalCache, session: SessionId) -> None:
        self._cache, self.session = cache, session

    @property
    def waiting(self) -> int:
        """Returns how many requests wait."""
        return len(self._waiting) + len(self._looks)

    @property
    def is_moving(self) -> bool:
        """Whether something comes from the tier, or is held for a request."""
        return bool(self._reading or self._held)

    def busy_spaces(self) -> set[int]:
        """Returns the identities of which something is asked for or on its way."""
        reading = (piece for piece, _ in self._reading.values())
        storing = (storing.piece for storing in self._storing)
        return self._looks.spaces() | {piece.space.number for piece in (*self._queue, *reading, *storing)}

    def forget_spaces(self, name_spaces: Set[int]) -> None:
        """Forgets identities that are not busy, and whose blocks no request asks for any more."""
        for key in [key for key in self._coming if key[0] in name_spaces]:
            del self._coming[key]

    @property
    def awaits_writer(self) -> bool:
        """Whether `advance` has something to do once another thread, which writes now, has done what was left to it."""
        return bool(self._storing) or (bool(self._queue) and self._queue[0].room is not None)

    def next_s(self) -> float | None:
        """Returns the time at which `expire` is due, or None."""
        times = [promotion.deadline_s for promotion in self._waiting]
        looks = self._looks.next_s()
        kept = [self._until_s(keep) for keep, _ in self._held]
        return min([*times, *kept, *([] if looks is None else [looks])], default=None)

    def find(self, asked: AskedFor, lacking: Found, now_s: float, then: Then, *, known: Found | None = None) -> None:
        """Finds which of the lacking blocks the tier has. `known`: what it has, if it need not be asked. `then` is
        called once: now, or from a later call of this object."""
        space, rows = asked.space, asked.rows

        def choose(found: Found, found_s: float) -> None:
            for group in range(len(space.rules)):
                found[group] &= lacking[group]
            # Records that must not be read are left out again before anything is read: here that saves a vain promise.
            if len(self._bad) and count_looks(space, rows) <= LOOKS_AT_ONCE:
                for group in range(len(space.rules)):
                    for shard in range(space.shards(group)):
                        self._bad.leave_out(space.names(group, rows[group].tobytes(), shard), found[group])
            then(found, found_s)

        if self._cache is None or self.waiting - self._peers_waiting >= self._settings.promotion_limit:
            then([np.zeros(len(group), np.bool_) for group in rows], now_s)
        elif known is not None:
            then([has & lacks for has, lacks in zip(known, lacking, strict=True)], now_s)
        else:
            wait_s = (asked.end_s - now_s) * _LOOK_SHARE
            self._looks.ask(space, rows, lacking, now_s=now_s, wait_s=wait_s, then=choose, owner=asked.owner)

    def is_too_slow(self, size_bytes: int, computing_s: float) -> bool:
        """Whether computing is estimated to be faster than bringing up so many bytes. Now and then it returns False all
        the same, to try the tier again."""
        if not (self.rate.is_measured and 0 < computing_s < self._estimate_s(size_bytes)) or self._is_trial_due():
            return False
        self._counts.too_slow += 1
        return True

    def bring_up(self, asked: AskedFor, part: PartOf, now_s: float, answer: Answer) -> None:
        """Brings up a part of what a request waits for. `answer` is called once."""
        space = asked.space
        promotion = Promotion(answer, part.boundary, asked.end_s, part.keep, now_s)
        self._waiting.add(promotion)
        for group, kept in enumerate(part.kept):
            # Blocks that are there already must not give way to those that come.
            self._hold(promotion, space, group, asked.rows[group][kept])
        before = [space.rows_before(group, asked.rows) for group in range(len(space.rules))]
        self._queue_pieces(promotion, space, asked.rows, before, part.missing)
        self.advance(now_s)
        self._settle(promotion, now_s)

    def bring(self, wanted: Wanted, now_s: float) -> None:
        """Brings up blocks that the tier has and memory has not, by their names alone, for another server."""
        space = self._find_space(wanted.name_space)
        if self._cache is None or space is None or self._peers_waiting >= self._settings.promotion_limit:
            wanted.answer(Promoted(outcome=PromotionOutcome.NOTHING, boundary=0))
            return
        rows = [as_rows(wanted.hashes if group == wanted.group else b"") for group in range(len(space.rules))]
        promotion = Promotion(wanted.answer, 0, wanted.deadline_s, Keep(1, wanted.deadline_s), now_s, is_peers=True)
        self._waiting.add(promotion)
        self._peers_waiting += 1
        nobody_knows = [np.zeros_like(group) for group in rows]
        self._queue_pieces(promotion, space, rows, nobody_knows, [np.arange(len(group)) for group in rows])
        self.advance(now_s)
        self._settle(promotion, now_s)

    def advance(self, now_s: float) -> None:
        """Gives the tier as much work as it may have, and ends pieces that have become readable."""
        self._end_stored(now_s)
        under_way = len({piece for piece, _ in self._reading.values()})
        while self._queue and self.rate.queued_bytes < self._settings.under_way_bytes and under_way < _MOST_PIECES:
            piece = self._queue[0]
            if (piece.waiters or piece.room is not None) and not self._begin(piece, now_s):
                return
            self._queue.popleft()
            self._queued_bytes -= piece.size_bytes
            if piece.waits_for:
                under_way += 1
            else:
                self._end(piece, now_s)

    def expire(self, now_s: float) -> None:
        """Answers requests whose time is over with what has come, and releases blocks that were held long enough."""
        self._looks.expire(now_s)
        for promotion in [one for one in self._waiting if one.deadline_s <= now_s]:
            self._counts.late += 1
            self._leave(promotion, list(promotion.pieces))
            self._settle(promotion, now_s)
        over = [leases for keep, leases in self._held if self._until_s(keep) <= now_s]
        if over:
            self._held = [one for one in self._held if self._until_s(one[0]) > now_s]
        for leases in over:
            self._release(leases)

    def finish(self, batch: FinishedBatch, now_s: float) -> bool:
        """Takes a batch that has ended. False: it is not one of these."""
        found = self._reading.pop(batch.ticket, None)
        if found is None:
            return self._looks.finish(batch, now_s)
        piece, shard = found
        record_bytes = piece.space.record_bytes(piece.group)
        is_found = batch.outcomes == RecordOutcome.FOUND
        count = len(is_found)
        self.rate.end(count * record_bytes, now_s, moved_bytes=int(is_found.sum()) * record_bytes)
        assert piece.read is not None
        damaged = batch.outcomes == RecordOutcome.DAMAGED
        if damaged.any():
            self._counts.quarantined += int(damaged.sum())
            self._bad.add(piece.space.names(piece.group, piece.read[damaged].tobytes(), shard))
        missing = batch.outcomes == RecordOutcome.MISSING
        self._counts.missing += int(missing.sum())
        self.on_missing(piece.space, piece.group, piece.read[missing | damaged].tobytes())
        piece.is_good &= is_found
        piece.digests[shard] = batch.digests
        piece.parents = batch.parents if batch.parents.strip(b"\0") else piece.before.tobytes()
        piece.waits_for -= 1
        if not piece.waits_for:
            self._store(piece)
            self._end_stored(now_s)
        return True

    def forget(self, space: TierSpace, group: int, hashes: bytes) -> None:
        """Removes these blocks from the tier, and does not store those that are on their way."""
        for shard in range(space.shards(group)):
            self._bad.add(space.names(group, hashes, shard))
        names = {row.tobytes() for row in as_rows(hashes)}
        for piece, _ in self._reading.values():
            if (piece.space.number, piece.group) == (space.number, group) and piece.read is not None:
                piece.is_good &= np.array([row.tobytes() not in names for row in piece.read])

    def end_all(self, now_s: float) -> None:
        """Answers all requests, and holds nothing for any: the server ends."""
        self._looks.end_all(now_s)
        for promotion in list(self._waiting):
            self._leave(promotion, list(promotion.pieces))
            self._settle(promotion, now_s)
        for _, leases in self._held:
            self._release(leases)
        self._held = []

    # ---- a request ----

    def _estimate_s(self, size_bytes: int) -> float:
        return self.rate.estimate_s(self._queued_bytes + size_bytes)

    def _is_trial_due(self) -> bool:
        """Whether to try the tier again: only reads show how fast it is, and refused requests read nothing."""
        self._refused += 1
        if self._refused < _TRIED_EVERY or any(self._coming.values()):
            return False
        self._refused = 0
        self.rate.measure_anew()
        return True

    def _queue_pieces(
        self,
        promotion: Promotion,
        space: TierSpace,
        rows: list[Rows],
        rows_before: list[Rows],
        missing: Sequence[npt.NDArray[np.int64]],
    ) -> None:
        """Makes the request wait for blocks that are on their way, and queues the others in the order of their
        tokens."""
        pieces = []
        for group, lacking in enumerate(missing):
            if (first := find_first(rows[group][lacking])) is not None:
                lacking = lacking[first]  # noqa: PLW2901 (each block once)
            positions, hashes = lacking, rows[group][lacking]
            names = as_names(hashes)
            before = rows_before[group][lacking]
            if coming := self._coming[space.number, group]:
                found = [coming.get(name) for name in names]
                for piece in {piece for piece in found if piece is not None}:
                    promotion.pieces.add(piece)
                    piece.waiters.add(promotion)
                fresh = [at for at, piece in enumerate(found) if piece is None]
                positions, hashes, names = positions[fresh], hashes[fresh], [names[at] for at in fresh]
                before = before[fresh]
            for part in cut_pieces(len(names), space.block_bytes(group), self._settings.piece_bytes):
                first_token = int(positions[part.start]) * space.rules[group].block_size
                pieces.append(Piece(space, group, hashes[part], before[part], names[part], first_token, {promotion}))
        for piece in sorted(pieces, key=lambda piece: piece.first_token):
            promotion.pieces.add(piece)
            self._queue.append(piece)
            self._queued_bytes += piece.size_bytes
            self._coming[space.number, piece.group].update(dict.fromkeys(piece.names, piece))

    def _leave(self, promotion: Promotion, pieces: list[Piece]) -> None:
        """Makes a request stop waiting for these pieces."""
        promotion.is_partly = True
        for piece in pieces:
            promotion.pieces.discard(piece)
            piece.waiters.discard(promotion)

    def _settle(self, promotion: Promotion, now_s: float) -> None:
        """Answers a request if it waits for nothing more."""
        if promotion.pieces or promotion not in self._waiting:
            return
        self._waiting.discard(promotion)
        self._peers_waiting -= promotion.is_peers
        self.waits.add(max(now_s - promotion.begun_s, 0.0))
        promotion.keep.end_part(now_s)
        if promotion.leases:
            self._held.append((promotion.keep, promotion.leases))
        outcome = PromotionOutcome.PARTLY if promotion.is_partly else PromotionOutcome.COMPLETE
        promotion.answer(Promoted(outcome=outcome, boundary=promotion.boundary))

    # ---- a piece ----

    def _begin(self, piece: Piece, now_s: float) -> bool:
        """Begins to read a piece. False: another thread writes, or the tier takes no more batches now."""
        cache, space, group = self._cache, piece.space, piece.group
        assert cache is not None
        room = piece.room = piece.room or self._make_room(piece)
        reserved = room.take()
        if reserved is None:
            return False
        piece.room = None
        if len(reserved) < len(room.hashes):
            piece.read = piece.hashes[:0]
            self._counts.without_room += len(piece.waiters)
            cache.leave_abort(self.session, reserved.tickets)
            return True
        wanted = reserved.tickets != 0
        tickets, read = reserved.tickets[wanted], room.hashes[wanted]
        if not piece.waiters:
            cache.leave_abort(self.session, tickets)
            return True
        record_bytes = space.record_bytes(group)
        pointers = cache.pointers(reserved.addresses[wanted])
        for shard in range(space.shards(group) if len(read) else 0):
            ticket = self._tier.get(
                space.names(group, read.tobytes(), shard),
                pointers + np.uint64(shard * record_bytes),
                record_bytes=record_bytes,
                timeout_s=_GET_TIMEOUT_S,
            )
            if ticket is None:
                break
            self._reading[ticket] = piece, shard
            self.rate.begin(len(tickets) * record_bytes, now_s)
            piece.waits_for += 1
        if len(read) and not piece.waits_for:
            cache.leave_abort(self.session, tickets)
            return False
        piece.tickets, piece.read, piece.before = tickets, read, room.before[wanted]
        # Without a batch for each shard no block is complete, and some may have been forgotten meanwhile.
        piece.is_good = self._find_trusted(space, group, read) & (piece.waits_for == space.shards(group))
        return True

    def _find_trusted(self, space: TierSpace, group: int, rows: Rows) -> npt.NDArray[np.bool_]:
        trusted = np.ones(len(rows), np.bool_)
        for shard in range(space.shards(group)):
            self._bad.leave_out(space.names(group, rows.tobytes(), shard), trusted)
        return trusted

    def _make_room(self, piece: Piece) -> Room:
        cache, space, group = self._cache, piece.space, piece.group
        assert cache is not None
        # Some may have been forgotten since it was queued.
        trusted = self._find_trusted(space, group, piece.hashes)
        hashes = piece.hashes[trusted]
        take = cache.leave_reserve(self.session, space.number, group, hashes=hashes.tobytes())
        return Room(hashes, piece.before[trusted], take)

    def _store(self, piece: Piece) -> None:
        """Commits the complete blocks, which can soon be read in memory. The other slots are given back."""
        cache, space, group, good = self._cache, piece.space, piece.group, piece.is_good
        assert cache is not None
        assert piece.read is not None
        cache.leave_abort(self.session, piece.tickets[~good])
        hashes, parents = piece.read[good], as_rows(piece.parents)[good]
        takes = [
            cache.leave_commit(
                self.session,
                space.number,
                group,
                piece.tickets[good],
                hashes=hashes.tobytes(),
                parents=parents.tobytes(),
                digests=np.ascontiguousarray(digests[good]),
                shard=shard,
            )
            for shard, digests in sorted(piece.digests.items())
            if len(hashes)
        ]
        self._storing.append(Storing(piece, hashes, parents, takes))

    def _end_stored(self, now_s: float) -> None:
        """Ends the pieces that can be read in memory from here on."""
        while self._storing:
            storing = self._storing[0]
            # The last shard's commit makes them readable, and is made last.
            outcomes = storing.takes[-1]() if storing.takes else np.empty(0, np.uint8)
            if outcomes is None:
                return
            self._storing.popleft()
            self._note_stored(storing, outcomes == CommitOutcome.READABLE)
            self._end(storing.piece, now_s)

    def _note_stored(self, storing: Storing, stored: npt.NDArray[np.bool_]) -> None:
        space, group, count = storing.piece.space, storing.piece.group, int(stored.sum())
        self._counts.promoted += count
        self._counts.promoted_bytes += count * space.block_bytes(group)
        if count:
            hashes, parents = storing.hashes[stored].tobytes(), storing.parents[stored].tobytes()
            assert self._cache is not None
            self._cache.leave_tier_notes(space.number, group, hashes, np.ones(count, np.bool_))
            self._on_stored(space, StoredBlocks(group, hashes, parents))

    def _end(self, piece: Piece, now_s: float) -> None:
        """Ends a piece that has come, as far as it could."""
        coming = self._coming[piece.space.number, piece.group]
        for name in piece.names:
            coming.pop(name, None)
        cache = self._cache
        assert cache is not None
        is_there = cache.lookup(piece.space.number, piece.group, piece.hashes.tobytes())
        for waiter in list(piece.waiters):
            self._hold(waiter, piece.space, piece.group, piece.hashes[is_there])
            self._leave_piece(waiter, piece, is_whole=bool(is_there.all()))
            self._settle(waiter, now_s)

    def _until_s(self, keep: Keep) -> float:
        return keep.end_s + self._settings.hold_s

    def _leave_piece(self, waiter: Promotion, piece: Piece, *, is_whole: bool) -> None:
        waiter.pieces.discard(piece)
        piece.waiters.discard(waiter)
        if not is_whole:
            # Its boundary cannot be reached any more, so pieces that have not begun to come would be of no use.
            self._leave(waiter, [other for other in waiter.pieces if other.read is None])

    def _hold(self, promotion: Promotion, space: TierSpace, group: int, names: Rows) -> None:
        assert self._cache is not None
        if len(names):
            hashes = names.tobytes()
            found = self._cache.acquire_entries(self.session, space.number, group, hashes, lease_for=LeaseFor.KEEP)
            if found.is_hit:
                promotion.leases.append(found.lease)

    def _release(self, leases: list[LeaseId]) -> None:
        assert self._cache is not None
        for lease in leases:
            self._cache.release(self.session, lease)

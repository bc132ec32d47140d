"""The digests that ranks report of a save: which rank writes which record, and whether ranks that should hold equal
bytes do."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvoffload.connector.common.step_plan import GroupFacts, SaveJob
from kvoffload.connector.identity.agreement import SharingSettings
from kvoffload.connector.saves.rank_part import Mask, RankPart
from kvoffload.types import HASH_BYTES

logger = logging.getLogger(__name__)

COMPARED_RECORDS = 64
"""Number of records of each group that are compared before its ranks count as equal. Every save until then has some."""
COMPARED_AT_ONCE = 8
"""Maximum number of records of a group that one save compares: a rank that compares holds copies of them in memory."""

Sums = npt.NDArray[np.uint64]
"""The two halves of each record's digest sum, by row of a rank's part and by move."""


class RankDigests:
    """Owned by the scheduler's thread."""

    def __init__(self, groups: Sequence[GroupFacts], sharing: SharingSettings) -> None:
        self._groups = tuple(groups)
        self._may_part = sharing.may_part
        self.unequal: dict[int, list[int]] = {}
        """The groups in which ranks hold different bytes where they should hold the same, with these ranks. Once there
        is one, nothing is published any more."""
        self._parts = [RankPart.find(rank, groups, sharing) for rank in range(sharing.ranks)]
        self._replicas = np.array([sharing.replicas_of(group) for group in groups], np.int64)
        self._has_replicas = bool((self._replicas > 1).any())
        self._rows = sharing.count_rows(groups)
        self._left: list[int] = []
        """Number of records still to compare, by group."""
        self.compare_again()

    def compare_again(self) -> None:
        """Starts the comparison over: the weights have changed, so ranks may hold different bytes from now on."""
        self._left = [COMPARED_RECORDS if replicas > 1 else 0 for replicas in self._replicas.tolist()]

    def choose_writers(
        self, groups: npt.NDArray[np.int64], names: Sequence[bytes]
    ) -> tuple[npt.NDArray[np.uint8] | None, npt.NDArray[np.bool_] | None]:
        """Returns, for each block of these groups and names, which of its replicas writes the record, and whether
        replicas are compared. None: there are no replicas; no block is compared."""
        if not self._has_replicas:
            return None, None
        words = np.frombuffer(b"".join(names), np.uint64)[:: HASH_BYTES // 8]
        writers = (words % self._replicas.astype(np.uint64)[groups]).astype(np.uint8)
        compared = np.zeros(len(groups), np.bool_)
        for group, left in enumerate(self._left):
            compared[np.flatnonzero(groups == group)[: min(left, COMPARED_AT_ONCE)]] = True
        return writers, compared if compared.any() else None

    def gather(self, job: SaveJob, reported: Mapping[int, bytes]) -> Sums | None:
        """Joins the digests that ranks reported. None: some are missing, or ranks hold different bytes where they
        should hold the same, in this job or an earlier one."""
        groups = job.moves.groups
        if len(self._parts) == 1:
            alone = self._parts[0].read_digests(reported.get(0, b""), len(groups))
            return None if alone is None else alone.transpose(1, 0, 2)
        sums = np.zeros((self._rows, len(groups), 2), np.uint64)
        for part in self._parts:
            digested, written = part.find_digested(job), part.find_written(job)
            reports = part.read_digests(reported.get(part.rank, b""), int(digested.sum()))
            if reports is None:
                return None
            at, mine = np.flatnonzero(written), reports[written[digested]]
            for offset in range(part.run):
                sums[part.rows[groups[at]] + offset, at] = mine[:, offset]
        if job.compared is not None and not self.unequal:
            self._compare(job.compared, job, reported, sums)
        return None if self.unequal else sums

    def _compare(self, all_compared: Mask, job: SaveJob, reported: Mapping[int, bytes], sums: Sums) -> None:
        """Compares each rank's digests of the chosen records with those that their writers reported."""
        found: set[tuple[int, int]] = set()
        for part in self._parts:
            digested, compared = part.find_digested(job), all_compared & part.find_loaded(job.moves)
            reports = part.read_digests(reported[part.rank], int(digested.sum()))
            assert reports is not None, "all have reported"
            at, mine = np.flatnonzero(compared), reports[compared[digested]]
            groups = job.moves.groups[at]
            for offset in range(part.run):
                bad = (mine[:, offset] != sums[part.rows[groups] + offset, at]).any(axis=1)
                found |= {(group, int(part.rows[group])) for group in groups[bad].tolist()}
        for group, row in sorted(found):
            ranks = [part.rank for part in self._parts if part.is_mine[group] and part.rows[group] == row]
            self.unequal.setdefault(group, []).extend(ranks)
            logger.warning(
                "%s: ranks %s should hold the same bytes of its blocks and do not: nothing of this save is kept, and "
                "%s",
                self._groups[group].name,
                ", ".join(map(str, ranks)),
                "from here on every rank's own are stored, under other names"
                if self._may_part
                else "nothing is saved or restored any more",
            )
        groups = job.moves.groups[all_compared]
        for group in set(groups.tolist()) - self.unequal.keys():
            self._left[group] = max(self._left[group] - int((groups == group).sum()), 0)

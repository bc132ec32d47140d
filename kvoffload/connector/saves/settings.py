"""The settings of one engine's saves, and the digests with which its records are published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvoffload.connector.identity.agreement import SharingSettings, name_node
from kvoffload.connector.saves.named_blocks import NamedBlocks
from kvoffload.engines.record_mover import RecordDigests
from kvoffload.types import Fingerprint

REPORT_WAIT_S = 60.0
"""How long a save waits for the reports of all ranks, in seconds. vLLM can lose a rank's report when a step fails."""


@dataclass(frozen=True, kw_only=True)
class SaveSettings:
    """The settings of one engine's saves."""

    fingerprint: Fingerprint
    sharing: SharingSettings
    node_bytes: Sequence[Sequence[int]]
    """Size of one shard of a record in bytes, by node and group."""
    report_wait_s: float = REPORT_WAIT_S

    def count_bytes(self, group: int, shards: int) -> int:
        """Returns the bytes of a block in this group, with so many shards on each node."""
        return shards * sum(sizes[group] for sizes in self.node_bytes)

    def finish(self, named: NamedBlocks, sums: npt.NDArray[np.uint64], shards: int) -> npt.NDArray[np.uint64]:
        """Makes the digests of all shards, one behind the other, from sums by row (`RankPart.rows`) and block. Each
        node has a fingerprint of its own, and numbers its shards from 0."""
        nodes = self.sharing.nodes
        rows = len(sums) // nodes
        return np.concatenate(
            [
                RecordDigests(name_node(self.fingerprint, node, nodes), self.node_bytes[node]).finish(
                    sums[node * rows + shard], named.hashes, group=named.group, shard=shard
                )
                for node in range(nodes)
                for shard in range(shards)
            ]
        )

"""The digests that records are told with: of every shard, by the name that its node has."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import numpy as np

from kvoffload.connector.identity.agreement import SharingSettings, name_node
from kvoffload.connector.saves.named_blocks import NamedBlocks
from kvoffload.connector.saves.settings import SaveSettings
from kvoffload.native import finish_digests
from kvoffload.types import Fingerprint

NAME = Fingerprint(b"f" * 32)
HASHES = b"a" * 32 + b"b" * 32
SIZES = ((64, 128), (64, 96))
"""Record sizes by node and group: machines may have stages of other layers."""


def make_settings(nodes: int) -> SaveSettings:
    sharing = SharingSettings(
        hash_block_size=4, hash_algorithm="sha256", hash_seed="0", tensor_ranks=2 * nodes, nodes=nodes
    )
    return SaveSettings(fingerprint=NAME, sharing=sharing, node_bytes=SIZES[:nodes])


@pytest.mark.parametrize(("nodes", "shards"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_every_shard_is_told_by_the_name_and_the_number_that_its_node_has(nodes: int, shards: int) -> None:
    """A group with fewer shards than another has unused rows."""
    sums = np.zeros((2 * nodes, 2, 2), np.uint64)
    sums[:, :, 0] = np.arange(4 * nodes).reshape(2 * nodes, 2)
    named = NamedBlocks(1, HASHES, b"", np.array([3, 4]))
    expected = [
        finish_digests(
            sums[2 * node + shard].tobytes(),
            SIZES[node][1],
            fingerprint=name_node(NAME, node, nodes),
            block_hashes=HASHES,
            group=1,
            shard=shard,
        )
        for node in range(nodes)
        for shard in range(shards)
    ]
    told = make_settings(nodes).finish(named, sums, shards)
    assert told.tobytes() == b"".join(expected)
    assert len(set(told.tolist())) == 2 * nodes * shards


def test_bytes_of_a_block_are_those_of_all_nodes() -> None:
    assert [make_settings(1).count_bytes(1, 2), make_settings(2).count_bytes(1, 2)] == [256, 448]

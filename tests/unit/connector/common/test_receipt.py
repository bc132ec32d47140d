"""A receipt names where each token of a prompt came from, and loses none."""

from __future__ import annotations

import pytest

from kvoffload.cache import NO_LIMIT
from kvoffload.connector.common.receipt import UNKNOWN, Receipt, Sources, split_hit

ALL_MEMORY = (("memory", NO_LIMIT),)
THREE = (("memory", 16), ("disk", 48), ("valkey", 64))


@pytest.mark.parametrize(
    ("local", "boundary", "reaches", "sources"),
    [
        (0, 64, ALL_MEMORY, (("memory", 64),)),
        (16, 64, ALL_MEMORY, (("memory", 48),)),
        (0, 64, THREE, (("memory", 16), ("disk", 32), ("valkey", 16))),
        (32, 64, THREE, (("disk", 16), ("valkey", 16))),
        (0, 40, THREE, (("memory", 16), ("disk", 24))),
        (0, 80, THREE, (("memory", 16), ("disk", 32), ("valkey", 16), (UNKNOWN, 16))),
        (0, 80, (*THREE, ("memory", NO_LIMIT)), (("memory", 16), ("disk", 32), ("valkey", 16), ("memory", 16))),
        (0, 64, (("memory", 0), ("disk", 0), ("peer", 64)), (("peer", 64),)),
        (0, 64, (), ((UNKNOWN, 64),)),
        (64, 64, THREE, ()),
    ],
)
def test_each_token_counts_for_the_farthest_source_that_it_needs(
    local: int, boundary: int, reaches: tuple[tuple[str, int], ...], sources: Sources
) -> None:
    assert split_hit(local, boundary, reaches) == sources


def test_a_receipt_counts_every_token_of_the_prompt_once() -> None:
    receipt = Receipt(
        engine_tokens=8,
        computed_tokens=2,
        sources=(("memory", 16), ("disk", 32), ("memory", 16)),
        saved_s=0.25,
        loaded_bytes=4096,
    )
    tokens = {"engine": 8, "computed": 2, "memory": 32, "disk": 32}
    assert receipt.describe() == {"tokens": tokens, "saved_s": 0.25, "loaded_bytes": 4096}


def test_a_load_that_failed_brought_nothing() -> None:
    receipt = Receipt(engine_tokens=8, computed_tokens=2, sources=(("disk", 32),), saved_s=0.25)
    assert receipt.without_load() == Receipt(engine_tokens=8, computed_tokens=34)

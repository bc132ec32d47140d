"""How close does chained block hashing come to hashing the same bytes in one go?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from kvoffload.bench.base import Progress, Result
from kvoffload.bench.limits import Limit
from kvoffload.bench.measure import measure_pair
from kvoffload.keys.block_hash import BlockHasher

PROMPT_TOKENS = 32768
BLOCK_SIZES = (16, 64, 256)


class BlockHashBenchmark:
    """A prompt of 32,768 tokens at several block sizes. The limit hashes the tokens' bytes alone, unchained."""

    name = "hash"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """One line per block size, in token bytes per second."""
        tokens = np.random.default_rng(1).integers(0, 150_000, PROMPT_TOKENS, dtype=np.uint32)
        for block_size in BLOCK_SIZES:
            progress(f"block size {block_size}")
            hasher = BlockHasher(block_size)
            root = hasher.root()
            limit = limit_sha256(tokens.nbytes)
            pair = measure_pair(lambda h=hasher, r=root: h.hash_blocks(tokens, parent=r), limit.call)  # type: ignore[misc]
            yield Result(
                name=self.name,
                value=tokens.nbytes / pair.value_s,
                unit="B/s",
                limit=limit.rate(pair.limit_s),
                spread=pair.spread,
                goal=None,
                params={"block_size": block_size, "tokens": PROMPT_TOKENS, "algorithm": hasher.algorithm},
            )


def limit_sha256(size_bytes: int) -> Limit:
    """OpenSSL's SHA-256 of one buffer of the same bytes: no chain, no block borders, no padding per block."""
    data = np.full(size_bytes, 7, np.uint8).tobytes()
    return Limit("sha256", lambda: hashlib.sha256(data).digest(), size_bytes, "B", 1e8)

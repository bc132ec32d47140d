"""A trace as a fleet sees it: when each request comes, and the numbers and hashes of its full blocks."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.cache.replay import pack_trace
from kvoffload.cache.trace import BLOCK_TOKENS, TraceRequest
from kvoffload.types import HASH_BYTES

Blocks = npt.NDArray[np.uint32]
_EMPTY = np.empty(0, np.uint32)


@dataclass(frozen=True, kw_only=True, eq=False)
class Workload:
    """`times_s` begin at 0 and are the trace's own; a fleet stretches them."""

    trace: native.ReplayTrace
    block_tokens: int
    times_s: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.int64]
    blocks: list[Blocks]
    parents: npt.NDArray[np.int64]
    """The parent of each block; -1: none."""
    hashes: bytes

    def list_run_starts(self, run_blocks: int) -> Blocks:
        """By block: the first one of its run, where a prefix is cut into runs of so many; 0: it is one run."""
        starts = np.zeros(self.trace.block_count, np.uint32)
        for blocks in self.blocks:
            at = np.arange(len(blocks))
            starts[blocks] = blocks[at - at % run_blocks if run_blocks else at * 0]
        return starts

    def list_hash_starts(self, run_blocks: int) -> Blocks:
        """The same, with runs of so many blocks in the mean: a block whose hash says so begins one."""
        begins = np.frombuffer(self.hashes, "<u8")[:: HASH_BYTES // 8] % run_blocks == 0
        starts = np.arange(self.trace.block_count, dtype=np.uint32)
        for block, parent in enumerate(self.parents.tolist()):
            if parent >= 0 and not begins[block]:
                starts[block] = starts[parent]
        return starts

    def hashes_of(self, blocks: Blocks) -> bytes:
        return np.frombuffer(self.hashes, f"V{HASH_BYTES}")[blocks].tobytes()


def make_workload(requests: Iterable[TraceRequest], *, split: int = 1) -> Workload:
    """`split`: each block of the trace is so many; its hashes are chained as an engine's are."""
    listed = list(requests)
    tokens = BLOCK_TOKENS // split
    cut = [_split(request, split) for request in listed] if split > 1 else listed
    trace = pack_trace(cut, block_tokens=tokens)
    numbered = iter(range(trace.request_count))
    blocks = [trace.request(next(numbered)) if request.full_blocks(tokens) else _EMPTY for request in cut]
    parents = np.full(trace.block_count, -1, np.int64)
    for one in blocks:
        parents[one[1:]] = one[:-1]
    return Workload(
        trace=trace,
        block_tokens=tokens,
        times_s=_spread_times([request.timestamp_ms / 1000 for request in listed]),
        tokens=np.array([request.input_length for request in listed], np.int64),
        blocks=blocks,
        parents=parents,
        hashes=_chain_hashes(parents),
    )


def _split(request: TraceRequest, split: int) -> TraceRequest:
    """Splits full blocks only, because the trace does not tell which parts of a partly filled one others share."""
    ids = tuple(block * split + part for block in request.full_blocks(BLOCK_TOKENS) for part in range(split))
    return replace(request, hash_ids=ids)


def _spread_times(times_s: list[float]) -> npt.NDArray[np.float64]:
    """The trace's clock ticks every three seconds: what comes in one tick is spread evenly until the next."""
    ticks = [(time_s, len(list(same))) for time_s, same in groupby(times_s)]
    ends = [time_s for time_s, _ in ticks[1:]] + [ticks[-1][0] + 1]
    spread = [
        begin_s + (end_s - begin_s) * at / count
        for (begin_s, count), end_s in zip(ticks, ends, strict=True)
        for at in range(count)
    ]
    return np.array(spread) - spread[0]


def _chain_hashes(parents: npt.NDArray[np.int64]) -> bytes:
    """A parent's number is below its children's."""
    hashes: list[bytes] = []
    for number, parent in enumerate(parents.tolist()):
        before = hashes[parent] if parent >= 0 else bytes(HASH_BYTES)
        hashes.append(hashlib.sha256(before + struct.pack("<Q", number)).digest())
    return b"".join(hashes)

"""How fast do records go to another cache server and back, against the same bytes over one plain TCP connection?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvoffload import native
from kvoffload.bench.base import Bound, Goal, Measure, Progress, Result
from kvoffload.bench.measure import measure_timed_pair
from kvoffload.bench.raw_socket import RawSocket
from kvoffload.bench.tier_load import Records, as_a_server, get_all, put_all
from kvoffload.peers import SpaceTable
from kvoffload.peers.seal_library import find_seal_library
from kvoffload.tiers.base import Tier
from kvoffload.units import MIB

DATA_BYTES = 128 * MIB
MEMORY_BYTES = 512 * MIB
"""Memory of the other server."""
SIZES = (MIB, 4 * MIB, 16 * MIB)
_GOALS = {"trusted": 0.8, "sealed": 0.6}


class PeerBenchmark:
    """Sealed links have the speed of AES-GCM as their limit, where that is less than the connection's."""

    name = "peer"
    question = __doc__ or ""

    def run(self, progress: Progress) -> Iterator[Result]:
        """Rates in bytes per second."""
        from kvoffload.bench.served_peer import PeerPlace, serve_peer

        memory = np.random.default_rng(3).integers(0, 256, DATA_BYTES, np.uint8)
        with RawSocket(memory) as raw:
            for mode in _GOALS:
                rounds = 0
                with serve_peer(MEMORY_BYTES, PeerPlace(is_sealed=mode == "sealed")) as (tier, spaces, _):
                    for size_bytes in SIZES:
                        # Rounds are counted on: each is an identity, and an identity has records of one size.
                        records = as_a_server(size_bytes, DATA_BYTES // size_bytes, memory)
                        records.round = rounds
                        for verb in ("put", "get"):
                            progress(f"{mode} {verb} of {size_bytes >> 20} MiB")
                            yield _measure(raw, Other(mode, tier, spaces), records, verb)
                        rounds = records.round


@dataclass(frozen=True)
class Other:
    """The other server, seen from here."""

    link: str
    tier: Tier
    spaces: SpaceTable


def _measure(raw: RawSocket, other: Other, records: Records, verb: str) -> Result:
    order = np.arange(records.count)

    from kvoffload.bench.served_peer import teach

    def put() -> float:
        # Each round has an identity of its own.
        teach(other.spaces, (records.round + 1).to_bytes(32, "little"), records.record_bytes)
        return put_all(other.tier, records)

    def limit() -> float:
        plain_s = raw.send(records.record_bytes) if verb == "put" else raw.receive(records.record_bytes)
        return plain_s if other.link == "trusted" else max(plain_s, native.time_sealing(DATA_BYTES))

    params: dict[str, Any] = {"what": verb, "link": other.link, "record_bytes": records.record_bytes}
    if other.link == "sealed":
        params["libcrypto"] = find_seal_library().describe()
    put()
    pair = measure_timed_pair(put if verb == "put" else lambda: get_all(other.tier, records, order), limit)
    return Result(
        name=PeerBenchmark.name,
        value=DATA_BYTES / pair.value_s,
        unit="B/s",
        limit=DATA_BYTES / pair.limit_s,
        spread=pair.spread,
        goal=Goal(Measure.RATIO, Bound.AT_LEAST, _GOALS[other.link]),
        params=params,
    )

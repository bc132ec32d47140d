"""Another cache server in a process of its own, and a tier over it, for which everything lives there."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import zmq

from kvoffload.bench.child import Child, answer_commands, say_ready
from kvoffload.bench.tier_load import TIMEOUT_S
from kvoffload.cache import CacheGeometry, CacheGroup, CacheSettings, GroupRule
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.errors import BenchmarkError
from kvoffload.key_files import KeyPair
from kvoffload.kvspec import ReuseRule
from kvoffload.peers import SpaceTable
from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.fleet_place import FleetPlace, FleetSettings
from kvoffload.server import Guest, TcpSettings
from kvoffload.server.loop import CacheServer, ServerPlan
from kvoffload.server.peer_links import PeeringPlan
from kvoffload.server.tiering.settings import TierPlan, TierSettings
from kvoffload.tiers.base import Tier, TierState
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.remote import RemoteTier
from kvoffload.types import HASH_BYTES

CONNECTIONS = 4
_HERE = "here"


def make_keys() -> KeyPair:
    return KeyPair(*zmq.curve_keypair())


def teach(spaces: SpaceTable, fingerprint: bytes, record_bytes: int) -> None:
    """An identity of one group."""
    group = CacheGroup(rule=GroupRule(block_size=16, reuse=ReuseRule.PREFIX), record_bytes=record_bytes)
    spaces.learn(0, fingerprint, CacheGeometry(hash_block_size=16, groups=(group,)))


def always_there(members: tuple[str, ...], hashes: bytes) -> npt.NDArray[np.intp]:
    """Places every record on the other server."""
    there = next((at for at, name in enumerate(members) if name != _HERE), 0)
    return np.full(len(hashes) // HASH_BYTES, there, np.intp)


@dataclass(frozen=True, kw_only=True)
class PeerPlace:
    """Where the other server is, and how records go there."""

    is_sealed: bool
    compress: Coding = Coding.OFF
    """Whether records are coded, at both servers."""
    host: str = "127.0.0.1"
    enter: Sequence[str] = ()
    """Words that the other server's command begins with."""


@contextmanager
def serve_peer(memory_bytes: int, there: PeerPlace) -> Iterator[tuple[Tier, SpaceTable, Child]]:
    """Yields a tier over another server, which runs in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kvoffload-bench-") as folder:
        path = Path(folder) / "peer"
        keys = make_keys()
        mode = "sealed" if there.is_sealed else "trusted"
        settings = (memory_bytes, there.host, f"{mode},{there.compress.value}", keys.public.decode())
        with Child(__name__, path, *settings, enter=there.enter) as child:
            port, key = child.ask("where")
            member = FleetMember(address=TcpAddress(there.host, port), key=key)
            spaces = SpaceTable()
            fleet = FleetSettings(
                own=FleetMember(address=TcpAddress("127.0.0.1", 0), key=_HERE),
                others=[member],
                keys=keys,
                is_sealed=there.is_sealed,
                compress=there.compress,
                timeout_s=TIMEOUT_S,
                connections=CONNECTIONS,
            )
            tier = FleetPlace(fleet, spaces, always_there).open_tier()
            try:
                await_ready(tier)
                yield tier, spaces, child
            finally:
                tier.close()


def await_ready(tier: Tier) -> None:
    """Waits for the peer. BenchmarkError: it does not come."""
    for member in tier.members.values():  # type: ignore[attr-defined]
        assert isinstance(member, RemoteTier)
        member.wait_open(TIMEOUT_S)
    health = tier.health()[0]
    if health.state is not TierState.READY:
        raise BenchmarkError(f"there is no peer: {health.reason}")


def main(path: str, memory_bytes: str, host: str, links: str, peer_key: str) -> None:
    """The other server, until the end of its input or SIGTERM. `links`: sealed or trusted, and how records travel."""
    mode, compress = links.split(",")
    keys = make_keys()
    spaces = SpaceTable()
    place = FleetPlace(
        FleetSettings(own=FleetMember(address=TcpAddress("127.0.0.1", 0), key="there"), others=[], keys=keys),
        spaces,
        always_there,
    )
    settings = TierSettings(name="peer", wants=place.lives_elsewhere, on_learn=spaces.learn)
    plan = ServerPlan(
        socket=Path(path),
        # With LRU the latest records stay, whether they were used or not.
        memory={"": CacheSettings(memory_bytes=int(memory_bytes), segment_bytes=int(memory_bytes), policy="lru")},
        remote=TcpSettings(
            address=TcpAddress(host, 0), keys=keys, guests={peer_key: Guest(domain="", name="here", is_peer=True)}
        ),
        tiers={"": [TierPlan(place=place, settings=settings)]},
        peering=PeeringPlan(
            address=TcpAddress(host, 0), spaces=spaces, is_sealed=mode == "sealed", compress=Coding(compress)
        ),
    )
    server = CacheServer(plan)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    while not server.has_memory or _grows(server):
        server.turn(0.01)
    loop = threading.Thread(target=server.run)
    loop.start()
    say_ready()
    answer_commands({"where": lambda: (int(server.remote_endpoint.rpartition(":")[2]), keys.public.decode())})
    server.stop()
    loop.join()
    server.close()


def _grows(server: CacheServer) -> bool:
    """While memory grows, records for which there is no room yet are refused."""
    return any(cache.ready_bytes < cache.capacity_bytes for cache in server.pools.caches.values())

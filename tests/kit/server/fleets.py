"""Fleets of real servers."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvoffload.cli.fleet import admit
from kvoffload.client import Client
from kvoffload.config.tcp_address import TcpAddress
from kvoffload.key_files import KeyPair
from kvoffload.peers import SpaceTable
from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.fleet_place import FleetPlace, FleetSettings
from kvoffload.peers.fleet_registry import RegistrySettings
from kvoffload.server.loop import CacheServer
from kvoffload.server.peer_links import PeeringPlan
from kvoffload.server.sessions.session import Guest
from kvoffload.server.sessions.settings import TcpSettings
from kvoffload.server.tiering.settings import TierPlan, TierSettings
from kvoffload.tiers.homes import find_homes
from kvoffload.tiers.record_coder import Coding
from tests.kit.cache.cache_model import HYBRID
from tests.kit.cache.offload_contract import names_of, save
from tests.kit.free_ports import free_port
from tests.kit.server.remote_client import make_keys
from tests.kit.server.tiers import NAME, WAIT_S, await_that, disk_below, serving, traffic_of
from tests.unit.client.conftest import make_settings

BLOCKS = 16 + 8 + 4


class Fleet:
    """Servers that know each other by their keys. `strangers`: those whose keys the others do not have."""

    def __init__(
        self,
        folder: Path,
        *names: str,
        is_sealed: bool = True,
        compress: Coding = Coding.OFF,
        registry: RegistrySettings | None = None,
    ) -> None:
        """Makes keys and addresses. `registry`: where the servers find each other; settings then name none of them."""
        self.folder = folder
        self.registry = registry
        self.is_sealed = is_sealed
        self.compress = compress
        self.keys: dict[str, KeyPair] = {name: make_keys() for name in names}
        self.members = {
            name: FleetMember(address=TcpAddress("127.0.0.1", free_port()), key=self.keys[name].public.decode())
            for name in names
        }
        self.places: dict[str, FleetPlace] = {}

    @contextmanager
    def serving(self, name: str, *, disk: Path | None = None, **changed: Any) -> Iterator[CacheServer]:
        spaces = SpaceTable()
        own = self.members[name]
        others = [member for other, member in self.members.items() if other != name and self.registry is None]
        settings = FleetSettings(
            own=own, others=others, keys=self.keys[name], is_sealed=self.is_sealed, timeout_s=5.0, probe_s=0.2
        )
        settings = replace(settings, compress=self.compress, registry=self.registry, **changed.pop("fleet", {}))
        announced: dict[str, Guest] = {}
        place = self.places[name] = FleetPlace(settings, spaces, find_homes, on_members=partial(admit, announced, ""))
        tier = TierSettings(
            name="peer",
            wants=place.lives_elsewhere,
            on_learn=spaces.learn,
        )
        if "hand_over_s" in changed:
            # Blocks that are saved just when a member comes are written twice then, and other tests count writes.
            tier = replace(tier, on_leave=place.leave, find_moved=place.find_moved)
        guests = {member.key: Guest(domain="", name=str(member.address), is_peer=True) for member in others}
        below = [] if disk is None else [disk_below(disk, wants=place.is_home)]
        options: dict[str, Any] = {
            "tiers": {"": [*below, TierPlan(place=place, settings=tier)]},
            "remote": TcpSettings(address=own.address, keys=self.keys[name], guests=ChainMap(guests, announced)),
            "peering": PeeringPlan(
                address=TcpAddress("127.0.0.1", 0), spaces=spaces, is_sealed=self.is_sealed, compress=self.compress
            ),
            **changed,
        }
        with serving(self.folder / name, **options) as server:
            yield server

    def count_elsewhere(self, name: str) -> int:
        """Counts, of what `save` saves there, the blocks that live on other machines."""
        homes = self.places[name]
        return sum(int(homes.lives_elsewhere(names_of(group)).sum()) for group in range(len(HYBRID.groups)))

    def save_at(self, name: str, server: CacheServer) -> int:
        """All groups' blocks, and until the server has sent what lives elsewhere: how many that are."""
        with self.client(name) as client:
            assert client.wait_until_served(WAIT_S)
            save(client)
            sent = self.count_elsewhere(name)
            await_that(lambda: traffic_of(server).counts.written == sent)
        assert 0 < sent < BLOCKS
        return sent

    def client(self, name: str) -> Client:
        return Client(make_settings(self.folder / name, name=NAME))

"""The fleet that a server belongs to, by its settings and the file's [[peers]]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvoffload.config.sources import Settings
from kvoffload.config.tcp_address import parse_tcp_address
from kvoffload.errors import ConfigError
from kvoffload.key_files import read_pair_for, read_private_text
from kvoffload.peers import SpaceTable
from kvoffload.peers.fleet_member import MAX_MEMBERS, FleetMember
from kvoffload.peers.fleet_place import FleetPlace, FleetSettings
from kvoffload.peers.fleet_registry import RegistrySettings
from kvoffload.peers.peer_server import MAX_LINKS, MAX_OF_ONE_PEER
from kvoffload.server import Guest
from kvoffload.server.config import ServerConfig
from kvoffload.server.peer_links import PeeringPlan
from kvoffload.server.tiering.settings import TierPlan, TierSettings, WriteRule
from kvoffload.tiers.homes import find_homes
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.valkey import ValkeySettings

MIN_SECRET_LETTERS = 16


@dataclass(frozen=True)
class FleetPlan:
    """The parts with which a server of a fleet is started."""

    tier: TierPlan
    place: FleetPlace
    """The place that `tier` reads from and writes to."""
    peering: PeeringPlan
    guests: dict[str, Guest]
    """Servers that the fleet's registry has announced, by public key. They change while the server runs."""


def plan_fleet(settings: Settings, config: ServerConfig) -> FleetPlan | None:
    """Plans the fleet of this server. None: it is in none. ConfigError: its settings do not fit together."""
    if not settings.peer_listen:
        if config.peers or settings.fleet_registry:
            what = "[[peers]] are named" if config.peers else "a fleet_registry is set"
            raise ConfigError(f"{what}, and nothing listens for peers", remedy="set peer_listen, and listen")
        return None
    if not settings.listen:
        raise ConfigError(
            f"setting 'peer_listen' = {settings.peer_listen!r} without listen",
            remedy="set listen: peers meet there before records travel",
        )
    links = parse_tcp_address(settings.peer_listen)
    keys = read_pair_for(settings.key_file, setting="peer_listen", address=settings.peer_listen)
    members = [FleetMember(address=parse_tcp_address(peer.address), key=peer.key) for peer in config.peers]
    own = FleetMember(address=parse_tcp_address(settings.listen), key=keys.public.decode())
    named = len({member.name for member in (*members, own)})
    if named > MAX_MEMBERS:
        raise ConfigError(
            f"{named} servers are named in [[peers]], this one included",
            remedy=f"a fleet has {MAX_MEMBERS} at most: make two of them",
        )
    spaces = SpaceTable()
    is_sealed = settings.peer_link == "sealed"
    compress = Coding(settings.peer_compress)
    registry = _plan_registry(settings, own)
    fleet_settings = FleetSettings(
        own=own,
        others=[member for member in members if member.name != own.name],
        keys=keys,
        domain=config.make_domains()[0].name,
        is_sealed=is_sealed,
        timeout_s=settings.remote_timeout,
        connections=min(settings.remote_connections, links_a_peer(MAX_MEMBERS if registry else len(members)) - 1),
        compress=compress,
        registry=registry,
    )
    guests: dict[str, Guest] = {}
    place = FleetPlace(fleet_settings, spaces, find_homes, on_members=partial(admit, guests, fleet_settings.domain))
    tier = TierSettings(
        name="peer",
        write=WriteRule(settings.remote_write),
        queue_s=settings.remote_queue,
        look_timeout_s=settings.remote_timeout,
        wants=place.lives_elsewhere,
        on_leave=place.leave,
        find_moved=place.find_moved,
        on_learn=spaces.learn,
        on_forget=spaces.forget,
    )
    return FleetPlan(
        tier=TierPlan(place=place, settings=tier),
        place=place,
        peering=PeeringPlan(
            address=links,
            spaces=spaces,
            is_sealed=is_sealed,
            compress=compress,
            is_known=_find_known(config, guests),
        ),
        guests=guests,
    )


def admit(guests: dict[str, Guest], domain: str, members: Sequence[FleetMember]) -> None:
    """Makes `guests` hold these members and no others, while the server's loop may read it."""
    announced = {member.key: Guest(domain=domain, name=str(member.address), is_peer=True) for member in members}
    guests.update(announced)
    for key in guests.keys() - announced.keys():
        del guests[key]


def _find_known(config: ServerConfig, guests: dict[str, Guest]) -> Callable[[str], bool]:
    """Returns a function that says whether a guest of that name is a peer, always or by the registry."""
    named = {peer.address for peer in config.peers}

    def is_known(name: str) -> bool:
        return name in named or any(guest.name == name for guest in list(guests.values()))

    return is_known


def _plan_registry(settings: Settings, own: FleetMember) -> RegistrySettings | None:
    if not settings.fleet_registry:
        return None
    if own.address.is_any or not own.address.port:
        raise ConfigError(
            f"setting 'listen' = {settings.listen!r} with a fleet_registry: others have to reach it",
            remedy="give the address of this machine that they know, and a port",
        )
    secret = read_private_text(Path(settings.fleet_secret_file)).strip() if settings.fleet_secret_file else ""
    if len(secret) < MIN_SECRET_LETTERS:
        raise ConfigError(
            f"setting 'fleet_secret_file' = {settings.fleet_secret_file!r} holds no secret",
            remedy=f"name a file with at least {MIN_SECRET_LETTERS} letters that all servers of the fleet have",
        )
    valkey = ValkeySettings.from_settings(settings, settings.fleet_registry)
    return RegistrySettings(valkey=valkey, fleet=settings.fleet_name, secret=secret.encode())


def links_a_peer(members: int) -> int:
    """Returns how many links one peer may have, of so many members. One of them is the probe's."""
    return max(min(MAX_OF_ONE_PEER, MAX_LINKS // max(members, 1)), 2)

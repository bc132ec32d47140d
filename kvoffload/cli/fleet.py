"""The fleet that a server belongs to, by its settings and the file's [[peers]]."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvoffload.config import Settings
from kvoffload.daemon.peer_office import PeeringPlan
from kvoffload.daemon.server_config import ServerConfig
from kvoffload.daemon.tier_terms import TierPlan, TierTerms, WriteRule
from kvoffload.errors import ConfigError
from kvoffload.key_files import KeyPair, read_pair
from kvoffload.peers import SpaceBook
from kvoffload.peers.fleet_member import FleetMember
from kvoffload.peers.fleet_place import FleetPlace, FleetTerms
from kvoffload.peers.homes import find_homes
from kvoffload.tcp_address import TcpAddress, parse_tcp_address


@dataclass(frozen=True)
class FleetPlan:
    """What a server of a fleet is started with."""

    tier: TierPlan
    place: FleetPlace
    """The tier's."""
    peering: PeeringPlan


def plan_fleet(settings: Settings, config: ServerConfig) -> FleetPlan | None:
    """None: it is in none. ConfigError: what is said does not fit together."""
    if not settings.peer_listen:
        if config.peers:
            raise ConfigError("[[peers]] are named, and nothing listens for them", remedy="set peer_listen, and listen")
        return None
    if not settings.listen:
        raise ConfigError(
            f"setting 'peer_listen' = {settings.peer_listen!r} without listen",
            remedy="set listen: peers meet there before records travel",
        )
    links = parse_tcp_address(settings.peer_listen)
    keys = read_pair(Path(settings.key_file)) if settings.key_file else None
    members = [FleetMember(address=parse_tcp_address(peer.address), key=peer.key or "") for peer in config.peers]
    own = FleetMember(address=parse_tcp_address(settings.listen), key="" if keys is None else keys.public.decode())
    _check_members(members, keys, links)
    spaces = SpaceBook()
    is_sealed = settings.peer_link == "sealed"
    terms = FleetTerms(
        own=own,
        others=[member for member in members if member.name != own.name],
        keys=keys,
        domain=config.make_domains()[0].name,
        is_sealed=is_sealed,
        timeout_s=settings.remote_timeout,
        connections=settings.remote_connections,
    )
    place = FleetPlace(terms, spaces, find_homes)
    tier = TierTerms(
        name="peer",
        write=WriteRule(settings.remote_write),
        queue_s=settings.remote_queue,
        wants=place.lives_elsewhere,
        on_learn=spaces.learn,
    )
    return FleetPlan(
        tier=TierPlan(place=place, terms=tier),
        place=place,
        peering=PeeringPlan(address=links, spaces=spaces, is_sealed=is_sealed),
    )


def _check_members(members: list[FleetMember], keys: KeyPair | None, links: TcpAddress) -> None:
    if keys is not None:
        unknown = next((member for member in members if not member.key), None)
        if unknown is not None:
            raise ConfigError(f"the peer at {unknown.address} has no key", remedy="give the public key of each peer")
        return
    afar = next(
        (address for address in (links, *(member.address for member in members)) if not address.is_loopback), None
    )
    if afar is not None:
        raise ConfigError(
            f"{afar} can be reached from other machines, and there are no keys",
            remedy="make some with `kvoffload keys new`, set key_file, and give each peer's key in [[peers]]",
        )
    known = next((member for member in members if member.key), None)
    if known is not None:
        raise ConfigError(f"the peer at {known.address} has a key, and this server has none", remedy="set key_file")

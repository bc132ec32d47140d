"""The place of a fleet: where its members are, and how the tier over them is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffload import native
from kvoffload.key_files import KeyPair
from kvoffload.peers.control_link import ControlLink, ControlSettings
from kvoffload.peers.fleet_member import MAX_MEMBERS, FleetMember, choose_members
from kvoffload.peers.fleet_registry import FleetRegistry, RegistrySettings
from kvoffload.peers.fleet_tier import FindHomes, FleetTier, Wants
from kvoffload.peers.peer_store import PeerStore, PeerStoreSettings
from kvoffload.peers.space_table import SpaceTable
from kvoffload.tiers.base import Tier
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from kvoffload.types import HASH_BYTES


@dataclass(frozen=True, kw_only=True)
class FleetSettings:
    """The settings of one server about its fleet."""

    own: FleetMember
    others: Sequence[FleetMember]
    keys: KeyPair
    """This server's own keys."""
    domain: str = ""
    is_sealed: bool = True
    timeout_s: float = 1.0
    connections: int = 4
    probe_s: float = 10.0
    """The most seconds until a peer's end, while nothing is asked of it, or its return is noticed."""
    compress: Coding = Coding.OFF
    registry: RegistrySettings | None = None
    """The registry where further members are announced, or None if `others` are all."""


class FleetPlace:
    """The TierPlace of a fleet. There is one for each server, since it has one fleet."""

    def __init__(
        self,
        settings: FleetSettings,
        spaces: SpaceTable,
        homes: FindHomes,
        *,
        on_members: Callable[[Sequence[FleetMember]], None] = lambda _: None,
    ) -> None:
        """`on_members` hears which members were announced, before anything is asked of them."""
        self.settings = settings
        self._on_members = on_members
        self._spaces = spaces
        self._homes = homes
        self._encoder = native.BackgroundEncoder()
        self._tier: FleetTier | None = None
        self._registry: FleetRegistry | None = None

    def describe(self) -> str:
        count = len(self.settings.others)
        known = "1 peer" if count == 1 else f"{count} peers"
        registry = self.settings.registry
        return known if registry is None else f"{known} and fleet {registry.fleet} at {registry.valkey.describe()}"

    def open_tier(self) -> Tier:
        """Opens the tier and starts its threads; no peer need be there."""
        assert self._tier is None
        members = {member.name: self._open_member(member) for member in self.settings.others}
        tier = self._tier = FleetTier(self.settings.own.name, members, self._homes)
        if self.settings.registry is not None:
            registry = self._registry = FleetRegistry(self.settings.registry, self.settings.own, self.take_members)
            tier.on_close = registry.close
            registry.start()
        return tier

    def take_members(self, announced: Sequence[FleetMember]) -> None:
        """Takes the members that the registry announces, in addition to those that the settings name."""
        assert self._tier is not None
        own = self.settings.own
        known = {member.name: member for member in (*announced, *self.settings.others)}
        chosen = choose_members([*known, own.name])
        members = {name: known[name] for name in chosen if name != own.name} if own.name in chosen else {}
        self._on_members([member for member in announced if member.name in members])
        self._tier.own_fault = self._find_fault(len(known.keys() | {own.name}), is_member=own.name in chosen)
        self._tier.set_members(
            {name: partial(self._open_member, member) for name, member in members.items()},
            {name: str(member.address) for name, member in members.items()},
        )

    def _find_fault(self, count: int, *, is_member: bool) -> str:
        """Returns why this server is no proper member of its fleet; empty: it is one."""
        if not is_member:
            return (
                f"the fleet has {count} servers, and its members are the first {MAX_MEMBERS} by key; "
                "this one is alone: make two fleets of them"
            )
        if self._registry is not None and self._registry.twin_at:
            return (
                f"another server, at {self._registry.twin_at}, announces itself with this server's key; "
                "give each a key of its own"
            )
        return ""

    def is_home(self, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Returns which of these records have their home on this machine."""
        if self._tier is None:
            return np.ones(len(hashes) // HASH_BYTES, np.bool_)
        return self._tier.is_home(hashes)

    def lives_elsewhere(self, hashes: bytes) -> npt.NDArray[np.bool_]:
        return ~self.is_home(hashes)

    def leave(self) -> Wants | None:
        """Makes others the homes of all records. Returns what finds those whose home was here, or None if no other
        member is there."""
        return None if self._tier is None else self._tier.leave()

    def find_moved(self) -> Wants | None:
        """Returns what finds the records of members that have come or come back. None: no member has."""
        return None if self._tier is None else self._tier.find_moved()

    def _open_member(self, member: FleetMember) -> RemoteTier:
        settings = self.settings
        control = ControlLink(
            ControlSettings(
                address=member.address,
                peer_key=member.key,
                keys=settings.keys,
                domain=settings.domain,
                timeout_s=settings.timeout_s,
            )
        )
        coder = RecordCoder(settings.compress, encoder=self._encoder)
        store = PeerStoreSettings(
            control=control,
            spaces=self._spaces,
            is_sealed=settings.is_sealed,
            timeout_s=settings.timeout_s,
            coder=coder,
        )
        open_store: Callable[[], PeerStore] = partial(PeerStore, store)
        return RemoteTier(
            RemoteTierSettings(
                place=str(member.address),
                open_store=open_store,
                connections=settings.connections,
                last_probe_s=settings.probe_s,
                coder=coder,
                on_close=control.close,
            )
        )

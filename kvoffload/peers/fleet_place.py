"""Where the members of a fleet are, and how the tier over them is opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvoffload.key_files import KeyPair
from kvoffload.peers.control_link import ControlLink, ControlTerms
from kvoffload.peers.fleet_tier import FindHomes, FleetTier
from kvoffload.peers.peer_store import PeerStore, PeerStoreTerms
from kvoffload.peers.space_book import SpaceBook
from kvoffload.tcp_address import TcpAddress
from kvoffload.tiers.base import Tier
from kvoffload.tiers.remote import RemoteTier, RemoteTierTerms
from kvoffload.types import HASH_BYTES


@dataclass(frozen=True, kw_only=True)
class FleetMember:
    """A server of the fleet. All machines know it by the same name: its public key, or without keys its address."""

    address: TcpAddress
    key: str = ""

    @property
    def name(self) -> str:
        return self.key or str(self.address)


@dataclass(frozen=True, kw_only=True)
class FleetTerms:
    """What one server knows of its fleet."""

    own: FleetMember
    others: Sequence[FleetMember]
    keys: KeyPair | None = None
    """Our own. None: on loopback alone."""
    domain: str = ""
    is_sealed: bool = True
    timeout_s: float = 1.0
    connections: int = 4
    probe_s: float = 10.0
    """How long a peer's end may go unnoticed while nothing is asked of it, and its return at most."""


class FleetPlace:
    """A TierPlace. One for each server, since it has one fleet."""

    def __init__(self, terms: FleetTerms, spaces: SpaceBook, homes: FindHomes) -> None:
        self._terms = terms
        self._spaces = spaces
        self._homes = homes
        self._tier: FleetTier | None = None

    def describe(self) -> str:
        count = len(self._terms.others)
        return "1 peer" if count == 1 else f"{count} peers"

    def open_tier(self) -> Tier:
        """Starts its threads; no peer need be there."""
        assert self._tier is None
        members = {member.name: self._open_member(member) for member in self._terms.others}
        self._tier = FleetTier(self._terms.own.name, members, self._homes)
        return self._tier

    def is_home(self, hashes: bytes) -> npt.NDArray[np.bool_]:
        """Which of these records live on this machine."""
        if self._tier is None:
            return np.ones(len(hashes) // HASH_BYTES, np.bool_)
        return self._tier.is_home(hashes)

    def lives_elsewhere(self, hashes: bytes) -> npt.NDArray[np.bool_]:
        return ~self.is_home(hashes)

    def _open_member(self, member: FleetMember) -> RemoteTier:
        terms = self._terms
        control = ControlLink(
            ControlTerms(
                address=member.address,
                peer_key=member.key,
                keys=terms.keys,
                domain=terms.domain,
                timeout_s=terms.timeout_s,
            )
        )
        store = PeerStoreTerms(
            control=control, spaces=self._spaces, is_sealed=terms.is_sealed, timeout_s=terms.timeout_s
        )
        open_store: Callable[[], PeerStore] = partial(PeerStore, store)
        return RemoteTier(
            RemoteTierTerms(
                place=str(member.address),
                open_store=open_store,
                connections=terms.connections,
                last_probe_s=terms.probe_s,
                on_close=control.close,
            )
        )

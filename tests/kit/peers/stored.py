"""Records that a peer gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvoffload.peers.peer_store import PeerStore
from tests.kit.tiers.tier_contract import Records


def put(store: PeerStore, records: Records, **changed: Any) -> list[int]:
    return store.put_slots(replace(records.batch(), **changed)).tolist()

"""Records that a peer gets."""

from __future__ import annotations

from typing import Any

from kvoffload.peers.peer_store import PeerStore
from tests.kit.tiers.tier_contract import Records


def put(store: PeerStore, records: Records, **changed: Any) -> list[int]:
    terms = {"digests": records.digests, "parents": records.parents, **changed}
    return store.put_slots(records.names, records.slots, record_bytes=records.record_bytes, **terms).tolist()

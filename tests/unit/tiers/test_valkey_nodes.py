"""Nodes of a cluster go, and others come: records are found where they are then."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.tiers.base import RecordOutcome, TierState
from kvoffload.tiers.envelope import list_names
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.valkey import PREFIX, ValkeySettings
from kvoffload.tiers.valkey_nodes import ClusterView, ValkeyNodes
from kvoffload.tiers.valkey_slots import SLOTS, SlotMap, slot_of
from tests.kit.tiers.tier_contract import Records, finish, get, put
from tests.kit.tiers.valkey_server import (
    Server,
    ask,
    await_state,
    await_told,
    make_tier,
    serve,
    serve_cluster,
    settings_of,
)

FOUND, UNAVAILABLE = RecordOutcome.FOUND, RecordOutcome.UNAVAILABLE
NOWHERE = ValkeySettings(address=ValkeyAddress(host="127.0.0.1", port=1))


def view_of(*servers: Server) -> ClusterView:
    nodes = tuple(("127.0.0.1", server.port) for server in servers)
    return ClusterView(SlotMap(firsts=(0,), lasts=(SLOTS - 1,), owners=nodes[:1], nodes=nodes))


def test_the_fault_of_the_node_that_is_named_is_told() -> None:
    with pytest.raises(StoreFaultError, match="refused"):
        ValkeyNodes(NOWHERE, ClusterView())


def test_another_node_stands_in_for_the_one_that_is_named(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        nodes = ValkeyNodes(NOWHERE, view_of(server))
        nodes.close()


def test_connections_that_were_interrupted_are_made_anew(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        nodes = ValkeyNodes(settings_of(server), ClusterView())
        nodes.interrupt()
        with pytest.raises(StoreFaultError):
            nodes.of(b"key").ask(b"DBSIZE")
        nodes.begin()
        assert nodes.of(b"key").ask(b"DBSIZE") == 0
        assert nodes.primaries() == [nodes.of(b"key")]
        nodes.close()


@pytest.mark.parametrize("named", [0, 1])
def test_a_replica_takes_over(tmp_path: Path, named: int) -> None:
    """Also where the node that is gone is the one that users name."""
    with serve_cluster(tmp_path, replicas=1) as servers:
        primary, replica = servers[0], servers[3]
        tier = make_tier(settings_of(servers[named]))
        written = Records(0, 40, 1000, filled=True)
        assert put(tier, written).count(RecordOutcome.WRITTEN) == 40
        held = ask(primary, "dbsize")
        assert int(held) > 5
        await_told(replica, held, "dbsize")
        primary.kill()
        read, found = Records(0, 40, 1000, filled=False), 0
        while found < 40:
            await_state(tier, TierState.READY)
            ended = finish(tier, tier.get(read.names, read.slots, record_bytes=1000, timeout_s=1.0))
            found = ended.count(FOUND)
            assert found + ended.count(UNAVAILABLE) + ended.count(RecordOutcome.LATE) == 40
        assert np.array_equal(read.memory, written.memory)
        assert "role:master" in ask(replica, "info", "replication")
        assert put(tier, Records(100, 40, 1000, filled=True)).count(RecordOutcome.WRITTEN) == 40
        tier.close()


def test_slots_that_move_are_found_where_they_are(tmp_path: Path) -> None:
    with serve_cluster(tmp_path) as servers:
        tier = make_tier(settings_of(servers[1]))
        records = Records(0, 12, 100, filled=True)
        put(tier, records)
        ask(servers[0], "flushall")
        slots = {slot_of(PREFIX + name.key) for name in list_names(records.names)}
        goal = ask(servers[1], "cluster", "myid")
        for server in (servers[1], servers[0], servers[2]):
            for slot in slots & set(range(SLOTS // 3)):
                ask(server, "cluster", "setslot", str(slot), "node", goal)
        assert put(tier, records).count(RecordOutcome.WRITTEN) == 12
        assert get(tier, Records(0, 12, 100, filled=False)).count(FOUND) == 12
        assert ask(servers[0], "dbsize") == "0"
        assert tier.health()[0].counts.get("lost", 0) == 0
        tier.close()

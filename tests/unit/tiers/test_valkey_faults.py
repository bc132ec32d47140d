"""Any fault of a server is a miss, told in one line, and costs no batch more than its timeout."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload.config.valkey_address import ValkeyAddress
from kvoffload.tiers.base import RecordOutcome, TierState
from kvoffload.tiers.envelope import list_names
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.resp_connection import RespConnection
from kvoffload.tiers.valkey import PREFIX, ValkeySettings
from tests.kit.tiers.tier_contract import TIMEOUT_S, Records, finish, get, get_all, put
from tests.kit.tiers.valkey_server import (
    Server,
    ask,
    await_state,
    make_certificate,
    make_tier,
    serve,
    serve_cluster,
    serve_tls,
    settings_of,
)

FOUND, UNAVAILABLE = RecordOutcome.FOUND, RecordOutcome.UNAVAILABLE


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("valkey")) as server:
        yield server


def fill(server: Server, records: Records) -> None:
    tier = make_tier(settings_of(server))
    assert put(tier, records).count(RecordOutcome.WRITTEN) == len(records.names)
    tier.close()


def test_a_server_that_evicts_nothing_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with serve(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        tier = make_tier(settings_of(server))
        ended = put(tier, Records(0, 10, 1 << 20, filled=True))
        assert 0 < ended.count(RecordOutcome.WRITTEN) < 10
        assert ended.count(RecordOutcome.FAILED) == 10 - ended.count(RecordOutcome.WRITTEN)
        assert tier.health()[0].state is TierState.READY
        tier.close()


def test_a_server_that_is_killed_costs_nothing_until_it_is_back(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        tier = make_tier(settings_of(server))
        records = Records(0, 4, 1000, filled=True)
        put(tier, records)
        server.kill()
        for _ in range(5):
            assert get(tier, Records(0, 4, 1000, filled=False)).count(UNAVAILABLE) == 4
        assert tier.health()[0].counts["lost"] == 1
        server.start()
        await_state(tier, TierState.READY)
        assert get(tier, Records(0, 4, 1000, filled=False)).count(RecordOutcome.MISSING) == 4, "it keeps nothing"
        put(tier, records)
        read = Records(0, 4, 1000, filled=False)
        assert get(tier, read).count(FOUND) == 4
        assert np.array_equal(read.memory, records.memory)
        tier.close()


def test_a_server_that_is_stopped_costs_one_timeout(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        fill(server, Records(0, 4, 1000, filled=True))
        tier = make_tier(settings_of(server, call_timeout_s=0.1))
        server.pause()
        read = Records(0, 4, 1000, filled=False)
        ended = finish(tier, tier.get(read.names, read.slots, record_bytes=1000, timeout_s=TIMEOUT_S))
        assert ended.count(UNAVAILABLE) == 4
        assert get(tier, read).count(UNAVAILABLE) == 4
        server.go_on()
        get_all(tier, read)
        tier.close()


def test_a_server_that_was_flushed_has_nothing(server: Server) -> None:
    tier = make_tier(settings_of(server))
    put(tier, Records(0, 4, 1000, filled=True))
    ask(server, "flushall")
    assert get(tier, Records(0, 4, 1000, filled=False)).count(RecordOutcome.MISSING) == 4
    tier.close()


@pytest.mark.parametrize("others", [[0], [39], list(range(0, 40, 7)), list(range(40))])
def test_a_key_of_another_type_is_a_miss_of_its_record_alone_and_heals(server: Server, others: list[int]) -> None:
    written = Records(0, 40, 1000, filled=True)
    fill(server, written)
    keys = [PREFIX + name.key for name in list_names(written.names)]
    with contextlib.closing(RespConnection("127.0.0.1", server.port, timeout_s=TIMEOUT_S)) as writer:
        for key in [*(keys[other] for other in others), PREFIX + b"probe"]:
            writer.ask(b"DEL", key)
            assert writer.ask(b"RPUSH", key, b"of another writer") == 1
    tier = make_tier(settings_of(server))
    assert tier.health()[0].state is TierState.READY
    read = Records(0, 40, 1000, filled=False)
    ended = get(tier, read)
    assert np.flatnonzero(ended.outcomes == RecordOutcome.DAMAGED).tolist() == others
    assert ended.count(FOUND) == 40 - len(others)
    assert get(tier, read).count(RecordOutcome.MISSING) == len(others)
    assert put(tier, written).count(RecordOutcome.WRITTEN) == 40
    assert get(tier, read).count(FOUND) == 40
    assert np.array_equal(read.memory, written.memory)
    assert tier.health()[0].counts.get("lost", 0) == 0
    tier.close()


def test_a_node_of_a_cluster_may_end(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, "--cluster-require-full-coverage", "no") as servers:
        tier = make_tier(settings_of(servers[0]))
        put(tier, Records(0, 30, 1000, filled=True))
        servers[2].kill()
        read = Records(0, 30, 1000, filled=False)
        ended = get(tier, read)
        assert ended.count(FOUND) + ended.count(UNAVAILABLE) + ended.count(RecordOutcome.MISSING) == 30
        tier.close()


@pytest.mark.parametrize("password", ["right", "wrong", ""])
def test_a_user_has_to_be_let_in(tmp_path: Path, password: str) -> None:
    rights = "--user cache on >right ~kvoffload:* +@all -@dangerous +info --user default off"
    with serve(tmp_path / "server", *rights.split()) as server:
        tier = make_tier(settings_of(server, user="cache" if password else "", password=password))
        records = Records(0, 2, 100, filled=True)
        if password == "right":
            assert put(tier, records).count(RecordOutcome.WRITTEN) == 2
        else:
            assert put(tier, records).count(UNAVAILABLE) == 2
            [health] = tier.health()
            assert health.state is TierState.ABSENT
            assert "password" in health.reason or "Authentication" in health.reason
            assert "\n" not in health.reason
            assert "wrong" not in health.reason.split()
        tier.close()


def test_nobody_there_is_said_in_one_line() -> None:
    with pytest.raises(StoreFaultError) as refused:
        ValkeySettings(address=ValkeyAddress(host="127.0.0.1", port=1)).make_opener()()
    assert "\n" not in str(refused.value)
    assert os.strerror(111).lower() in str(refused.value).lower()


def test_a_slow_server_costs_one_timeout_and_is_found_again(server: Server) -> None:
    written = Records(40, 4, 1000, filled=True)
    fill(server, written)
    tier = make_tier(settings_of(server, call_timeout_s=0.05))
    ask(server, "client", "pause", "3000")
    read = Records(40, 4, 1000, filled=False)
    assert get(tier, read).count(UNAVAILABLE) == 4
    assert tier.health()[0].reason == "no answer within 0.05 s"
    get_all(tier, read)
    assert np.array_equal(read.memory, written.memory)
    tier.close()


def test_a_batch_does_not_wait_for_a_slow_server_beyond_its_own_timeout(server: Server) -> None:
    tier = make_tier(settings_of(server, call_timeout_s=TIMEOUT_S))
    put(tier, Records(50, 4, 1000, filled=True))
    late, read = Records(50, 4, 1000, filled=False), Records(50, 4, 1000, filled=False)
    server.pause()
    try:
        ended = finish(tier, tier.get(late.names, late.slots, record_bytes=1000, timeout_s=0.01))
    finally:
        server.go_on()
    assert ended.count(RecordOutcome.LATE) == 4
    assert get(tier, read).count(FOUND) == 4
    assert not late.memory.any()
    assert tier.health()[0].counts.get("lost", 0) == 0
    tier.close()


def test_a_user_without_rights_is_told_which(tmp_path: Path) -> None:
    rights = "--user cache on >right ~kvoffload:* +@all -@dangerous +info -set"
    with serve(tmp_path / "server", *rights.split()) as server:
        tier = make_tier(settings_of(server, user="cache", password="right"))
        for _ in range(3):
            assert put(tier, Records(0, 2, 100, filled=True)).count(UNAVAILABLE) == 2
        [health] = tier.health()
        assert health.state is TierState.ABSENT
        assert "no permissions to run the 'set' command" in health.reason
        assert "\n" not in health.reason
        tier.close()


def test_a_certificate_that_nobody_trusts_is_refused(tmp_path: Path) -> None:
    with serve_tls(tmp_path) as (server, _):
        _, other = make_certificate(tmp_path, "other")
        bad = make_tier(settings_of(server, has_tls=True, ca_file=str(other)))
        assert put(bad, Records(0, 2, 100, filled=True)).count(UNAVAILABLE) == 2
        assert "CERTIFICATE_VERIFY_FAILED" in bad.health()[0].reason
        bad.close()
        nothing = make_tier(settings_of(server, has_tls=True, ca_file=str(tmp_path / "nothing.pem")))
        assert "certificates cannot be read" in nothing.health()[0].reason
        nothing.close()
        plain_text = make_tier(settings_of(server, call_timeout_s=0.3))
        assert plain_text.health()[0].state is TierState.ABSENT
        plain_text.close()

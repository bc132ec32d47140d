"""A real server passes the contract, alone and as a cluster; whatever becomes of it is a miss, and said in one line."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("redis", reason="redis-py is not installed")

from kvoffload.tiers.base import RecordOutcome, Tier, TierState
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.remote import RemoteTier, RemoteTierTerms
from kvoffload.tiers.valkey import PREFIX, ValkeyTerms
from kvoffload.valkey_address import ValkeyAddress
from tests.unit.tiers.tier_contract import TIMEOUT_S, Records, TierContract, finish, get, put
from tests.unit.tiers.valkey_server import Server, ask, serve, serve_cluster

CAPACITY = ("--maxmemory", "48mb", "--maxmemory-policy", "allkeys-lru")
FOUND, UNAVAILABLE = RecordOutcome.FOUND, RecordOutcome.UNAVAILABLE


def make_tier(terms: ValkeyTerms) -> RemoteTier:
    tier = RemoteTier(
        RemoteTierTerms(
            place=str(terms.address), open_store=terms.open_store, connections=2, first_probe_s=0.02, last_probe_s=0.05
        )
    )
    assert tier.wait_open(TIMEOUT_S)
    return tier


def await_state(tier: RemoteTier, state: TierState) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while tier.health()[0].state is not state:
        assert time.monotonic() < end_s, tier.health()
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("valkey"), *CAPACITY) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with serve_cluster(tmp_path_factory.mktemp("cluster"), *CAPACITY) as servers:
        yield list(servers)


def terms_of(server: Server, *, user: str = "", has_tls: bool = False, **changes: object) -> ValkeyTerms:
    address = ValkeyAddress(host="127.0.0.1", port=server.port, user=user, has_tls=has_tls)
    return ValkeyTerms(address=address, **changes)  # type: ignore[arg-type]


class TestValkey(TierContract):
    @pytest.fixture
    def tier(self, server: Server) -> Iterator[Tier]:
        ask(server, "flushall")
        tier = make_tier(terms_of(server))
        yield tier
        tier.close()


class TestValkeyCluster(TierContract):
    @pytest.fixture
    def tier(self, cluster: list[Server]) -> Iterator[Tier]:
        for one in cluster:
            ask(one, "flushall")
        tier = make_tier(terms_of(cluster[1]))
        yield tier
        tier.close()


def test_a_cluster_has_a_part_on_each_node(cluster: list[Server]) -> None:
    for one in cluster:
        ask(one, "flushall")
    tier = make_tier(terms_of(cluster[0]))
    put(tier, Records(0, 60, 100, filled=True))
    assert all(int(ask(one, "dbsize")) >= 5 for one in cluster)
    tier.close()


def test_records_live_as_long_as_is_said_and_a_use_is_a_new_life(server: Server) -> None:
    ask(server, "flushall")
    tier = make_tier(terms_of(server, ttl_s=1000))
    records = Records(0, 1, 100, filled=True)
    put(tier, records)
    key = next(iter(ask(server, "--no-raw", "keys", "*").split('"')[1:2]))
    assert key.startswith(PREFIX.decode())
    assert 990 <= int(ask(server, "eval", "return redis.call('ttl', redis.call('keys', '*')[1])", "0")) <= 1000
    ask(server, "eval", "return redis.call('expire', redis.call('keys', '*')[1], 5)", "0")
    put(tier, records)
    assert int(ask(server, "eval", "return redis.call('ttl', redis.call('keys', '*')[1])", "0")) > 900
    tier.close()


def test_a_server_that_evicts_nothing_refuses_what_does_not_fit(tmp_path: Path) -> None:
    with serve(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        tier = make_tier(terms_of(server))
        ended = put(tier, Records(0, 10, 1 << 20, filled=True))
        assert 0 < ended.count(RecordOutcome.WRITTEN) < 10
        assert ended.count(RecordOutcome.FAILED) == 10 - ended.count(RecordOutcome.WRITTEN)
        assert tier.health()[0].state is TierState.READY
        tier.close()


def test_a_server_that_is_killed_costs_nothing_until_it_is_back(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        tier = make_tier(terms_of(server))
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
        tier = make_tier(terms_of(server, call_timeout_s=0.1))
        put(tier, Records(0, 4, 1000, filled=True))
        server.pause()
        read = Records(0, 4, 1000, filled=False)
        ended = finish(tier, tier.get(read.names, read.slots, record_bytes=1000, timeout_s=TIMEOUT_S))
        assert ended.count(UNAVAILABLE) == 4
        assert get(tier, read).count(UNAVAILABLE) == 4
        server.go_on()
        await_state(tier, TierState.READY)
        assert get(tier, read).count(FOUND) == 4
        tier.close()


def test_a_server_that_was_flushed_has_nothing(server: Server) -> None:
    tier = make_tier(terms_of(server))
    put(tier, Records(0, 4, 1000, filled=True))
    ask(server, "flushall")
    assert get(tier, Records(0, 4, 1000, filled=False)).count(RecordOutcome.MISSING) == 4
    tier.close()


def test_a_node_of_a_cluster_may_end(tmp_path: Path) -> None:
    with serve_cluster(tmp_path, "--cluster-require-full-coverage", "no") as servers:
        tier = make_tier(terms_of(servers[0], call_timeout_s=0.3))
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
        tier = make_tier(terms_of(server, user="cache" if password else "", password=password))
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


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def test_a_certificate_that_nobody_trusts_is_refused(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path, "server")
    _, other = make_certificate(tmp_path, "other")
    port = 0
    with serve(tmp_path / "plain") as plain:
        port = plain.port
    tls = ("--port", "0", "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key))
    with serve(tmp_path / "tls", *tls, "--tls-auth-clients", "no", port=port) as server:
        good = make_tier(terms_of(server, has_tls=True, ca_file=str(certificate)))
        assert put(good, Records(0, 2, 100, filled=True)).count(RecordOutcome.WRITTEN) == 2
        assert good.health()[0].name == f"valkeys://127.0.0.1:{port}/0"
        good.close()
        bad = make_tier(terms_of(server, has_tls=True, ca_file=str(other)))
        assert put(bad, Records(0, 2, 100, filled=True)).count(UNAVAILABLE) == 2
        assert "CERTIFICATE_VERIFY_FAILED" in bad.health()[0].reason
        bad.close()
        plain_text = make_tier(terms_of(server, call_timeout_s=0.3))
        assert plain_text.health()[0].state is TierState.ABSENT
        plain_text.close()


def test_nobody_there_is_said_in_one_line() -> None:
    with pytest.raises(StoreFaultError) as refused:
        ValkeyTerms(address=ValkeyAddress(host="127.0.0.1", port=1)).open_store()
    assert "\n" not in str(refused.value)
    assert os.strerror(111).lower() in str(refused.value).lower()

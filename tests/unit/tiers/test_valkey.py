"""A real server passes the contract: alone, as a cluster, and behind TLS."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvoffload.config.sources import load_settings
from kvoffload.errors import ConfigError
from kvoffload.tiers.base import RecordOutcome, Tier
from kvoffload.tiers.envelope import HEAD_BYTES, list_keys
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.valkey import PREFIX, ValkeySettings
from tests.kit.tiers.learning_coder import check_learning
from tests.kit.tiers.seals import make_keys
from tests.kit.tiers.tier_contract import TIMEOUT_S, Records, TierContract, finish, get, put
from tests.kit.tiers.valkey_server import Server, ask, make_tier, serve, serve_cluster, serve_tls, settings_of

CAPACITY = ("--maxmemory", "48mb", "--maxmemory-policy", "allkeys-lru")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("valkey"), *CAPACITY) as server:
        yield server


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    with serve_cluster(tmp_path_factory.mktemp("cluster"), *CAPACITY) as servers:
        yield list(servers)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    with serve_tls(tmp_path_factory.mktemp("tls"), *CAPACITY) as served:
        yield served


class TestValkey(TierContract):
    drops_the_oldest = False

    @pytest.fixture
    def tier(self, server: Server) -> Iterator[Tier]:
        ask(server, "flushall")
        tier = make_tier(settings_of(server))
        yield tier
        tier.close()


class TestValkeyOfCodedRecords(TierContract):
    has_numbers = True
    drops_the_oldest = False

    @pytest.fixture
    def tier(self, server: Server) -> Iterator[Tier]:
        ask(server, "flushall")
        tier = make_tier(settings_of(server, compress=Coding.ON))
        yield tier
        tier.close()


class TestValkeyOfSealedRecords(TierContract):
    drops_the_oldest = False
    lists_digests = False

    @pytest.fixture
    def tier(self, server: Server) -> Iterator[Tier]:
        ask(server, "flushall")
        tier = make_tier(settings_of(server), keys=make_keys(1))
        yield tier
        tier.close()


class TestValkeyOfCodedAndSealedRecords(TierContract):
    has_numbers = True
    drops_the_oldest = False
    lists_digests = False

    @pytest.fixture
    def tier(self, server: Server) -> Iterator[Tier]:
        ask(server, "flushall")
        tier = make_tier(settings_of(server, compress=Coding.ON), keys=make_keys(1))
        yield tier
        tier.close()


class TestValkeyCluster(TierContract):
    drops_the_oldest = False

    @pytest.fixture
    def tier(self, cluster: list[Server]) -> Iterator[Tier]:
        for one in cluster:
            ask(one, "flushall")
        tier = make_tier(settings_of(cluster[1]))
        yield tier
        tier.close()


class TestValkeyBehindTls(TierContract):
    drops_the_oldest = False

    @pytest.fixture
    def tier(self, tls: tuple[Server, Path]) -> Iterator[Tier]:
        server, certificate = tls
        ask(server, "--tls", "--cacert", str(certificate), "flushall")
        tier = make_tier(settings_of(server, has_tls=True, ca_file=str(certificate)))
        yield tier
        tier.close()


def test_a_cluster_has_a_part_on_each_node(cluster: list[Server]) -> None:
    for one in cluster:
        ask(one, "flushall")
    tier = make_tier(settings_of(cluster[0]))
    put(tier, Records(0, 60, 100, filled=True))
    assert all(int(ask(one, "dbsize")) >= 5 for one in cluster)
    tier.close()


def test_records_live_as_long_as_is_said_and_a_use_is_a_new_life(server: Server) -> None:
    ask(server, "flushall")
    tier = make_tier(settings_of(server, ttl_s=1000))
    records = Records(0, 1, 100, filled=True)
    put(tier, records)
    key = next(iter(ask(server, "--no-raw", "keys", "*").split('"')[1:2]))
    assert key.startswith(PREFIX.decode())
    assert 990 <= int(ask(server, "eval", "return redis.call('ttl', redis.call('keys', '*')[1])", "0")) <= 1000
    ask(server, "eval", "return redis.call('expire', redis.call('keys', '*')[1], 5)", "0")
    put(tier, records)
    assert int(ask(server, "eval", "return redis.call('ttl', redis.call('keys', '*')[1])", "0")) > 900
    tier.close()


@pytest.mark.parametrize("reader", list(Coding))
def test_coded_records_are_shorter_there_and_come_back_as_they_were(server: Server, reader: Coding) -> None:
    ask(server, "flushall")
    one, other = make_tier(settings_of(server, compress=Coding.ON)), make_tier(settings_of(server, compress=reader))
    written = Records(0, 3, 20_000, filled=True, has_numbers=True)
    assert put(one, written).count(RecordOutcome.WRITTEN) == 3
    counts = one.health()[0].counts
    assert (counts["coded_records"], counts["coded_bytes"]) == (3, 60_000)
    stored = "local all = 0; for _, key in ipairs(redis.call('keys', '*')) do all = all + redis.call('strlen', key) end"
    assert int(ask(server, "eval", f"{stored}; return all", "0")) == counts["coded_stored_bytes"] + 3 * HEAD_BYTES
    read = Records(0, 3, 20_000, filled=False)
    assert get(other, read).count(RecordOutcome.FOUND) == 3
    assert np.array_equal(read.memory, written.memory)
    one.close()
    other.close()


def test_a_read_tells_apart_whatever_the_answers_are(server: Server) -> None:
    ask(server, "flushall")
    plain, coding = make_tier(settings_of(server)), make_tier(settings_of(server, compress=Coding.ON))
    records = Records(0, 40, 20_000, filled=True, has_numbers=True)
    changes = {at: ("coded", "missing", "damaged", "longer")[at % 4] for at in (0, 7, 8, 9, 10, 22, 33, 39)}
    for at in range(40):
        one = records.batch().part(slice(at, at + 1))
        tier = coding if changes.get(at) == "coded" else plain
        finish(tier, tier.put(one, timeout_s=TIMEOUT_S))
        key = "".join(f"\\{byte:03}" for byte in PREFIX + list_keys(one.names)[0])
        call = {"missing": "'del', '{}'", "damaged": "'setrange', '{}', 5000, 'x'", "longer": "'append', '{}', 'x'"}
        if changes.get(at) in call:
            assert ask(server, "eval", f"return redis.call({call[changes[at]].format(key)})", "0")
    read = Records(0, 40, 20_000, filled=False)
    ended = get(plain, read)
    wanted = {"missing": RecordOutcome.MISSING, "damaged": RecordOutcome.DAMAGED, "longer": RecordOutcome.DAMAGED}
    assert ended.outcomes.tolist() == [wanted.get(changes.get(at, ""), RecordOutcome.FOUND) for at in range(40)]
    for at in np.flatnonzero(ended.outcomes == RecordOutcome.FOUND).tolist():
        assert np.array_equal(read.memory[at], records.memory[at])
        assert ended.digests[at] == records.digests[at]
    plain.close()
    coding.close()


def test_what_is_read_decides_what_is_coded(server: Server) -> None:
    ask(server, "flushall")
    check_learning(lambda coder: make_tier(settings_of(server), coder))


def test_a_coded_record_that_is_damaged_there_is_a_miss_and_removed(server: Server) -> None:
    ask(server, "flushall")
    tier = make_tier(settings_of(server, compress=Coding.ON))
    put(tier, Records(0, 2, 20_000, filled=True, has_numbers=True))
    spoil = "redis.call('setrange', redis.call('keys', '*')[1], 7000, 'spoiled')"
    ask(server, "eval", f"{spoil}; return 1", "0")
    ended = get(tier, Records(0, 2, 20_000, filled=False))
    assert (ended.count(RecordOutcome.FOUND), ended.count(RecordOutcome.DAMAGED)) == (1, 1)
    assert int(ask(server, "dbsize")) == 1
    tier.close()


def test_the_password_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o600)
    flags = {"valkey": "valkey://near", "valkey_password_file": str(file), "valkey_ttl": "1h", "remote_timeout": "2s"}
    settings = load_settings(flags=flags).settings
    tier_settings = ValkeySettings.from_settings(settings, "valkey://registry")
    assert (tier_settings.describe(), tier_settings.password, tier_settings.ttl_s, tier_settings.call_timeout_s) == (
        "valkey://registry:6379/0",
        "secret",
        3600,
        2.0,
    )


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("secret")
    file.chmod(0o644)
    flags = {"valkey": "valkey://near", "valkey_password_file": str(file)}
    with pytest.raises(ConfigError, match="password"):
        ValkeySettings.from_settings(load_settings(flags=flags).settings, "valkey://near")


@pytest.mark.parametrize("compress", [Coding.OFF, Coding.ON])
@pytest.mark.parametrize(
    ("keys", "others", "is_rotated"),
    [((), (1,), False), ((1,), (2,), False), ((2,), (3, 2), True)],
    ids=["planted", "lost", "rotated"],
)
def test_records_that_do_not_open_are_misses_and_make_room(
    server: Server, compress: Coding, keys: tuple[int, ...], others: tuple[int, ...], is_rotated: bool
) -> None:
    ask(server, "flushall")
    settings = settings_of(server, compress=compress)
    tier = make_tier(settings, keys=make_keys(*keys) if keys else None)
    put(tier, Records(0, 4, 1000, filled=True, has_numbers=True))
    tier.close()
    tier = make_tier(settings, keys=make_keys(*others))
    assert get(tier, Records(0, 4, 1000, filled=False)).count(RecordOutcome.FOUND) == (4 if is_rotated else 0)
    assert int(ask(server, "dbsize")) == (4 if is_rotated else 0)
    tier.close()

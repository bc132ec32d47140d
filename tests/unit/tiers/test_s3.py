"""A bucket of a real server, and one of moto's, passes the contract; whatever becomes of what is in it is a miss."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore is not installed")

import obstore

from kvoffload.s3_keys import S3Keys
from kvoffload.tiers.base import RecordOutcome, Tier, TierState
from kvoffload.tiers.record_coder import Coding
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.s3 import WHOLE_BYTES, S3Settings
from tests.kit.free_ports import free_ports
from tests.kit.tiers.s3_server import KEYS, READER, S3Server, client, make_tier, serve_weed
from tests.kit.tiers.seals import make_keys
from tests.kit.tiers.tier_contract import Records, TierContract, get, look, put

FOUND, MISSING, UNAVAILABLE = RecordOutcome.FOUND, RecordOutcome.MISSING, RecordOutcome.UNAVAILABLE
LARGE = WHOLE_BYTES


class TestS3OfMoto(TierContract):
    @pytest.fixture
    def tier(self, moto: S3Server) -> Iterator[Tier]:
        tier = make_tier(moto.settings())
        yield tier
        tier.close()


class TestS3OfARealServer(TierContract):
    @pytest.fixture
    def tier(self, weed: S3Server) -> Iterator[Tier]:
        tier = make_tier(weed.settings())
        yield tier
        tier.close()


class TestS3OfSealedRecords(TierContract):
    lists_digests = False

    @pytest.fixture
    def tier(self, weed: S3Server) -> Iterator[Tier]:
        tier = make_tier(weed.settings(), keys=make_keys(1))
        yield tier
        tier.close()


def paths_of(settings: S3Settings, part: str = "") -> list[str]:
    return [one["path"] for page in obstore.list(client(settings)) for one in page if part in one["path"]]


@pytest.mark.parametrize("record_bytes", [1000, LARGE])
def test_what_one_server_writes_another_one_finds_at_once(weed: S3Server, record_bytes: int) -> None:
    settings = weed.settings()
    one, other = make_tier(settings), make_tier(settings)
    for first in (0, 10, 20):
        records = Records(first, 5, record_bytes, filled=True)
        assert look(other, records.names) == [False] * 5
        assert put(one, records).count(RecordOutcome.WRITTEN) == 5
        assert look(other, records.names) == [True] * 5
        read = Records(first, 5, record_bytes, filled=False)
        assert get(other, read).count(FOUND) == 5
        assert np.array_equal(read.memory, records.memory)
    assert len(paths_of(settings, "/record/")) == (15 if record_bytes == LARGE else 0)
    one.close()
    other.close()


@pytest.mark.parametrize("record_bytes", [20_000, LARGE + 1000, 2 * LARGE])
def test_coded_records_come_back_as_they_were(weed: S3Server, record_bytes: int) -> None:
    """Those in the middle would be objects of their own, and are small enough for a pack when they are coded."""
    settings = weed.settings(compress=Coding.ON)
    one, other = make_tier(settings), make_tier(replace(settings, compress=Coding.OFF))
    written, read = (Records(0, 3, record_bytes, filled=filled, has_numbers=True) for filled in (True, False))
    assert put(one, written).count(RecordOutcome.WRITTEN) == 3
    counts = one.health()[0].counts
    assert (counts["coded_records"], counts["coded_bytes"]) == (3, 3 * record_bytes)
    assert counts["coded_stored_bytes"] < 0.8 * counts["coded_bytes"]
    assert get(other, read).count(FOUND) == 3
    assert np.array_equal(read.memory, written.memory)
    assert len(paths_of(settings, "/record/")) == (3 if record_bytes == 2 * LARGE else 0)
    one.close()
    other.close()


def test_small_and_large_records_of_one_name_space_are_found(weed: S3Server) -> None:
    tier = make_tier(weed.settings())
    for first, record_bytes in enumerate((100, LARGE, 3000)):
        put(tier, Records(first, 1, record_bytes, filled=True))
    again = make_tier(weed.settings())
    assert look(tier, Records(0, 4, 1, filled=False).names) == [True, True, True, False]
    for first, record_bytes in enumerate((100, LARGE, 3000)):
        read = Records(first, 1, record_bytes, filled=False)
        assert get(tier, read).count(FOUND) == 1
        assert np.array_equal(read.memory, Records(first, 1, record_bytes, filled=True).memory)
    tier.close()
    again.close()


def test_a_record_larger_than_a_part_comes_back_whole(weed: S3Server) -> None:
    tier = make_tier(weed.settings())
    records = Records(0, 2, (20 << 20) + 7, filled=True)
    put(tier, records)
    read = Records(0, 2, (20 << 20) + 7, filled=False)
    assert get(tier, read).count(FOUND) == 2
    assert np.array_equal(read.memory, records.memory)
    tier.close()


@pytest.mark.parametrize("record_bytes", [1000, LARGE])
@pytest.mark.parametrize("gone", ["/pack/", "/record/", "/index-", ""])
def test_what_the_bucket_has_dropped_is_a_miss_and_written_again(weed: S3Server, gone: str, record_bytes: int) -> None:
    settings = weed.settings()
    tier, other = make_tier(settings), make_tier(settings)
    records = Records(0, 4, record_bytes, filled=True)
    put(tier, records)
    assert look(other, records.names) == [True] * 4
    obstore.delete(client(settings), paths_of(settings, gone))
    read = Records(0, 4, record_bytes, filled=False)
    is_left = gone not in (("/record/", "") if record_bytes == LARGE else ("/pack/", ""))
    assert get(other, read).count(FOUND if is_left else MISSING) == 4
    assert look(tier, records.names) == [is_left] * 4
    assert put(tier, records).count(RecordOutcome.WRITTEN) == 4
    assert get(other, read).count(FOUND) == 4
    assert np.array_equal(read.memory, records.memory)
    later = Records(50, 2, record_bytes, filled=True)
    assert put(tier, later).count(RecordOutcome.WRITTEN) == 2
    assert look(other, later.names) == [True, True]
    tier.close()
    other.close()


@pytest.mark.parametrize("record_bytes", [1000, LARGE])
@pytest.mark.parametrize("part", ["/pack/", "/record/", "/index-"])
@pytest.mark.parametrize("damage", ["bit", "short", "empty", "other"])
def test_whatever_an_object_has_become_no_wrong_bytes_come(
    moto: S3Server, part: str, damage: str, record_bytes: int
) -> None:
    settings = moto.settings()
    tier = make_tier(settings)
    records = Records(0, 4, record_bytes, filled=True)
    put(tier, records)
    put(tier, Records(10, 4, record_bytes, filled=True))
    bucket = client(settings)
    values = {path: bytes(obstore.get(bucket, path).bytes()) for path in paths_of(settings, part)}
    for at, (path, value) in enumerate(values.items()):
        broken = bytearray(value)
        broken[len(value) // 2] ^= 4
        others = list(values.values())
        changed = {"bit": bytes(broken), "short": value[: len(value) // 2], "empty": b"", "other": others[at - 1]}
        obstore.put(bucket, path, changed[damage])
    other = make_tier(settings)
    for asked in (tier, other):
        read = Records(0, 4, record_bytes, filled=False)
        ended = get(asked, read)
        for at in np.flatnonzero(ended.outcomes == FOUND):
            assert np.array_equal(read.memory[at], records.memory[at])
        assert ended.count(FOUND) + ended.count(MISSING) + ended.count(RecordOutcome.DAMAGED) == 4
        assert asked.health()[0].state is TierState.READY
    assert put(tier, records).count(RecordOutcome.WRITTEN) == 4
    tier.close()
    other.close()


def test_wrong_keys_are_refused_in_one_line(weed: S3Server) -> None:
    for keys in (replace(KEYS, secret="not-this-one"), S3Keys(key_id="nobody", secret="not-this-one")):
        tier = make_tier(weed.settings(keys=keys))
        assert put(tier, Records(0, 2, 100, filled=True)).count(UNAVAILABLE) == 2
        [health] = tier.health()
        assert health.state is TierState.ABSENT
        assert health.reason.startswith("403 ")
        assert "\n" not in health.reason
        assert "not-this-one" not in health.reason
        tier.close()


@pytest.mark.parametrize("record_bytes", [1000, LARGE])
def test_a_user_who_may_only_read_does_so(weed: S3Server, record_bytes: int) -> None:
    settings = weed.settings()
    tier = make_tier(settings)
    put(tier, Records(0, 2, record_bytes, filled=True))
    reader = make_tier(replace(settings, keys=READER))
    assert get(reader, Records(0, 2, record_bytes, filled=False)).count(FOUND) == 2
    assert put(reader, Records(5, 2, record_bytes, filled=True)).count(RecordOutcome.FAILED) == 2
    assert reader.health()[0].state is TierState.READY
    tier.close()
    reader.close()


def make_certificate(folder: Path, name: str) -> tuple[Path, Path]:
    key, certificate = folder / f"{name}.key", folder / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(certificate), "-days", "2", "-subj", f"/CN={name}"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


def test_a_certificate_that_nobody_trusts_is_refused(tmp_path: Path) -> None:
    key, certificate = make_certificate(tmp_path, "server")
    _, other = make_certificate(tmp_path, "other")
    [https] = free_ports(1)
    options = ["-s3.port.https", str(https), "-s3.cert.file", str(certificate), "-s3.key.file", str(key)]
    with serve_weed(tmp_path / "tls", *options) as server:
        settings = replace(server.settings(), endpoint=f"https://127.0.0.1:{https}")
        good = make_tier(replace(settings, ca_certificates=certificate.read_text()))
        assert put(good, Records(0, 2, 100, filled=True)).count(RecordOutcome.WRITTEN) == 2
        good.close()
        for trusted in (other.read_text(), ""):
            bad = make_tier(replace(settings, ca_certificates=trusted))
            assert put(bad, Records(0, 2, 100, filled=True)).count(UNAVAILABLE) == 2
            assert "its certificate is not trusted" in bad.health()[0].reason
            bad.close()


def test_nobody_there_is_said_in_one_line() -> None:
    with pytest.raises(StoreFaultError) as refused:
        S3Server(endpoint="http://127.0.0.1:1").settings().open_store().probe()
    assert str(refused.value) == "Connection refused"


def test_a_bucket_that_is_not_there_is_said(moto: S3Server) -> None:
    settings = moto.settings()
    tier = make_tier(replace(settings, address=replace(settings.address, bucket="another")))
    assert tier.health()[0].state is TierState.ABSENT
    assert tier.health()[0].reason.startswith("404 NoSuchBucket")
    tier.close()

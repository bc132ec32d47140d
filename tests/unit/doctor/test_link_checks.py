"""The doctor's checks of the keys and links of a server that listens over TCP."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvoffload.doctor import link_checks
from kvoffload.doctor.findings import Verdict
from kvoffload.doctor.link_checks import check_keys, check_sealing, look_at_sealing
from kvoffload.key_files import write_new_pair
from kvoffload.peers.seal_library import SealLibrary
from tests.kit.doctor.machines import GOOD, able

OLD = SealLibrary(name="OpenSSL 3.0.19", version=0x300000D0, file="/lib/libcrypto.so.3")
NEW = SealLibrary(name="OpenSSL 3.5.9", version=0x30500090, file="/lib/libcrypto-3.5.so.3")
WIDE = able(cpu_features=("avx2", "vaes", "vpclmulqdq", "avx512f"))


def test_it_tells_the_library_its_file_and_its_speed() -> None:
    found = check_sealing(NEW, 9.87e9, WIDE)
    assert found.verdict is Verdict.OK
    assert found.text == "by OpenSSL 3.5.9 (/lib/libcrypto-3.5.so.3): 9.9 GB/s on a core"


def test_an_old_library_is_warned_of_where_the_processor_could_do_more() -> None:
    found = check_sealing(OLD, 4.3e9, WIDE)
    assert (found.verdict, found.remedy) == (Verdict.WARN, link_checks.NEWER)
    assert check_sealing(OLD, 4.3e9, GOOD).verdict is Verdict.OK


def test_without_any_library_links_cannot_be_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> SealLibrary:
        raise RuntimeError("no libcrypto")

    monkeypatch.setattr(link_checks, "find_seal_library", find)
    found = look_at_sealing(GOOD)
    assert (found.verdict, found.text) == (Verdict.FAIL, "no libcrypto")


def test_this_machine_is_looked_at() -> None:
    assert "GB/s on a core" in look_at_sealing(GOOD).text


def test_each_address_without_keys_is_told_as_the_server_would_refuse_it(tmp_path: Path) -> None:
    addresses = {"listen": "tcp://127.0.0.1:5555", "peer_listen": "tcp://127.0.0.1:5556"}
    missing = list(check_keys("", addresses))
    assert [one.verdict for one in missing] == [Verdict.FAIL, Verdict.FAIL]
    assert "'peer_listen' = 'tcp://127.0.0.1:5556' without key_file" in missing[1].text
    assert "kvoffload keys new" in missing[1].remedy
    (unread,) = check_keys(str(tmp_path / "none.key"), {**addresses, "peer_listen": ""})
    assert (unread.check, unread.verdict) == ("keys", Verdict.FAIL)
    assert "cannot be read" in unread.text
    secret = next(file for file in write_new_pair(tmp_path / "here") if file.suffix == ".key")
    assert [one.verdict for one in check_keys(str(secret), addresses)] == [Verdict.OK, Verdict.OK]
    assert list(check_keys("", dict.fromkeys(addresses, ""))) == []

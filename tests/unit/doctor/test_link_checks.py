"""What the doctor says of sealed links."""

from __future__ import annotations

import pytest

from kvoffload.doctor import link_checks
from kvoffload.doctor.findings import Verdict
from kvoffload.doctor.link_checks import check_sealing, look_at_sealing
from kvoffload.peers.seal_library import SealLibrary
from tests.kit.doctor.machines import GOOD, able

OLD = SealLibrary(name="OpenSSL 3.0.19", version=0x300000D0, file="/lib/libcrypto.so.3")
NEW = SealLibrary(name="OpenSSL 3.5.9", version=0x30500090, file="/site/libcrypto-1.so.3")
REFUSED = SealLibrary(name="OpenSSL 3.0.19", version=0x300000D0, file="/lib/libcrypto.so.3", refusal="others may write")
WIDE = able(cpu_features=("avx2", "vaes", "vpclmulqdq", "avx512f"))


def test_it_tells_the_library_its_file_and_its_speed() -> None:
    found = check_sealing(NEW, 9.87e9, WIDE)
    assert found.verdict is Verdict.OK
    assert found.text == "by OpenSSL 3.5.9 (/site/libcrypto-1.so.3): 9.9 GB/s on a core"


def test_an_old_library_is_warned_of_where_the_processor_could_do_more() -> None:
    found = check_sealing(OLD, 4.3e9, WIDE)
    assert (found.verdict, found.remedy) == (Verdict.WARN, "pip install 'kvoffload[seal]'")
    assert check_sealing(OLD, 4.3e9, GOOD).verdict is Verdict.OK


def test_a_package_whose_library_is_refused_is_warned_of() -> None:
    found = check_sealing(REFUSED, 4.3e9, GOOD)
    assert found.verdict is Verdict.WARN
    assert found.text.endswith("psycopg-binary has another one: others may write")


def test_without_any_library_links_cannot_be_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> SealLibrary:
        raise RuntimeError("no libcrypto")

    monkeypatch.setattr(link_checks, "find_seal_library", find)
    found = look_at_sealing(GOOD)
    assert (found.verdict, found.text) == (Verdict.FAIL, "no libcrypto")


def test_this_machine_is_looked_at() -> None:
    assert "GB/s on a core" in look_at_sealing(GOOD).text

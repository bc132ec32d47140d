"""A real master and store pass the contract over TCP; when they are gone, no call waits longer than its timeout."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvoffload.config.mooncake_address import MooncakeAddress
from kvoffload.tiers import mooncake
from kvoffload.tiers.base import RecordNames, RecordOutcome, Tier, TierState
from kvoffload.tiers.envelope import list_names
from kvoffload.tiers.mooncake import MooncakeSettings
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import StoreFaultError, Value, view_slot
from tests.kit.tiers.learning_coder import check_learning
from tests.kit.tiers.mooncake_server import Master, add_libraries, make_tier, serve_mooncake
from tests.kit.tiers.seals import make_keys
from tests.kit.tiers.tier_contract import (
    FINGERPRINT,
    TIMEOUT_S,
    Records,
    TierContract,
    finish,
    get,
    get_all,
    hashes_of,
    put,
)

FOUND, MISSING, UNAVAILABLE = RecordOutcome.FOUND, RecordOutcome.MISSING, RecordOutcome.UNAVAILABLE


@pytest.fixture(autouse=True, scope="module")
def libraries() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        add_libraries(patch)
        yield


@pytest.fixture(scope="module")
def master(libraries: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    with serve_mooncake(tmp_path_factory.mktemp("mooncake")) as master:
        yield master


def empty(tier: Tier) -> None:
    names = RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(0, 600))
    finish(tier, tier.remove(names, timeout_s=TIMEOUT_S))
    for group in (1, 2):
        few = RecordNames(fingerprint=FINGERPRINT, hashes=hashes_of(0, 10), group=group)
        finish(tier, tier.remove(few, timeout_s=TIMEOUT_S))


@pytest.mark.parametrize("coding", [Coding.OFF, Coding.ON])
def test_sealed_records_come_back_with_their_key_alone(master: Master, coding: Coding) -> None:
    settings = MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S, compress=coding)
    written = Records(0, 4, 20_000, filled=True, has_numbers=True)
    tier = make_tier(settings, keys=make_keys(1))
    empty(tier)
    put(tier, written)
    tier.close()
    for keys, count in ((make_keys(2, 1), 4), (make_keys(3), 0)):
        tier = make_tier(settings, keys=keys)
        read = Records(0, 4, 20_000, filled=False)
        ended = get_all(tier, read) if count else get(tier, read)
        assert ended.count(FOUND) == count
        assert not count or np.array_equal(read.memory, written.memory)
        tier.close()


class TestMooncake(TierContract):
    is_listed = False

    @pytest.fixture
    def tier(self, master: Master) -> Iterator[Tier]:
        tier = make_tier(MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S))
        empty(tier)
        yield tier
        tier.close()

    def test_more_than_the_capacity_is_never_there(self, tier: Tier) -> None:
        """How much there is, the client does not say; what does not fit is refused, or makes the store evict."""
        count, record_bytes = 16, 1 << 20
        for first in range(12):
            ended = put(tier, Records(first * count, count, record_bytes, filled=True))
            assert ended.count(RecordOutcome.WRITTEN) + ended.count(RecordOutcome.FAILED) == count
        read = Records(0, 12 * count, record_bytes, filled=False)
        ended, written = get(tier, read), Records(0, 12 * count, record_bytes, filled=True)
        assert ended.count(FOUND) + ended.count(MISSING) == 12 * count
        assert 0 < ended.count(FOUND) < 128
        for at in np.flatnonzero(ended.outcomes == FOUND):
            assert np.array_equal(read.memory[at], written.memory[at])


class TestMooncakeOfCodedRecords(TierContract):
    is_listed = False
    has_numbers = True
    drops_the_oldest = False

    @pytest.fixture
    def tier(self, master: Master) -> Iterator[Tier]:
        tier = make_tier(MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S, compress=Coding.ON))
        empty(tier)
        yield tier
        tier.close()


@pytest.mark.parametrize("reader", list(Coding))
def test_coded_records_come_back_as_they_were_beside_others(master: Master, reader: Coding) -> None:
    one, other = (
        make_tier(MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S, compress=coding))
        for coding in (Coding.ON, reader)
    )
    empty(one)
    written = Records(0, 3, 20_000, filled=True, has_numbers=True)
    # Has no numbers, and does not become shorter.
    plain = Records(3, 2, 20_000, filled=True)
    assert put(one, written).count(RecordOutcome.WRITTEN) == 3
    assert put(one, plain).count(RecordOutcome.WRITTEN) == 2
    counts = one.health()[0].counts
    assert (counts["coded_records"], counts["coded_bytes"]) == (3, 60_000)
    assert counts["coded_stored_bytes"] < 50_000
    for first, before in ((0, written), (3, plain)):
        read = Records(first, len(before.memory), 20_000, filled=False)
        assert get(other, read).count(FOUND) == len(before.memory)
        assert np.array_equal(read.memory, before.memory)
    one.close()
    other.close()


def test_what_is_read_decides_what_is_coded(master: Master) -> None:
    settings = MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S)
    tier = make_tier(settings)
    empty(tier)
    tier.close()
    check_learning(lambda coder: make_tier(settings, coder))


def test_a_store_that_is_killed_is_a_miss(tmp_path: Path, libraries: None) -> None:
    with serve_mooncake(tmp_path) as master:
        tier = make_tier(MooncakeSettings(address=master.address, call_timeout_s=20.0))
        put(tier, Records(0, 4, 1000, filled=True))
        read = Records(0, 4, 1000, filled=False)
        assert get(tier, read).count(FOUND) == 4
        master.kill_store()
        ended = get(tier, read)
        assert ended.count(FOUND) + ended.count(MISSING) + ended.count(UNAVAILABLE) == 4
        assert ended.count(FOUND) == 0
        assert put(tier, Records(50, 2, 1000, filled=True)).count(RecordOutcome.WRITTEN) == 0
        tier.close()


def test_a_master_that_hangs_costs_one_timeout(tmp_path: Path, libraries: None) -> None:
    with serve_mooncake(tmp_path) as master:
        written = Records(0, 4, 1000, filled=True)
        patient = make_tier(MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S))
        put(patient, written)
        patient.close()
        tier = make_tier(MooncakeSettings(address=master.address, call_timeout_s=0.3))
        read = Records(0, 4, 1000, filled=False)
        # From here on each connection has its client.
        get_all(tier, read)
        read.memory[:] = 0
        master.pause()
        assert get(tier, read).count(UNAVAILABLE) == 4
        for _ in range(5):
            assert get(tier, read).count(UNAVAILABLE) == 4
        assert tier.health()[0].reason == "no answer within 0.3 s"
        assert not read.memory.any()
        master.go_on()
        get_all(tier, read)
        assert np.array_equal(read.memory, written.memory)
        tier.close()


def test_a_client_that_is_set_up_while_the_master_hangs_is_given_up(
    tmp_path: Path, libraries: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve_mooncake(tmp_path) as master:
        settings = MooncakeSettings(address=master.address)
        master.pause()
        monkeypatch.setattr(mooncake.store_child, "START_S", 1.0)
        with pytest.raises(StoreFaultError, match="no answer within 1 s"):
            settings.open_store()
        monkeypatch.undo()
        master.go_on()
        settings.open_store().close()


def test_a_batch_does_not_wait_for_a_master_beyond_its_own_timeout(tmp_path: Path, libraries: None) -> None:
    with serve_mooncake(tmp_path) as master:
        tier = make_tier(MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S))
        put(tier, Records(0, 4, 1000, filled=True))
        master.pause()
        read = Records(0, 4, 1000, filled=False)
        ended = finish(tier, tier.get(read.names, read.slots, record_bytes=1000, timeout_s=0.05))
        assert ended.count(RecordOutcome.LATE) == 4
        master.go_on()
        assert not read.memory.any()
        assert tier.health()[0].counts.get("lost", 0) == 0
        assert get(tier, read).count(FOUND) == 4
        tier.close()


def test_a_master_that_is_killed_is_said_to_be_gone(tmp_path: Path, libraries: None) -> None:
    with serve_mooncake(tmp_path) as master:
        tier = make_tier(MooncakeSettings(address=master.address))
        put(tier, Records(0, 4, 1000, filled=True))
        master.kill()
        assert get(tier, Records(0, 4, 1000, filled=False)).count(UNAVAILABLE) == 4
        [health] = tier.health()
        assert health.state is TierState.ABSENT
        assert "\n" not in health.reason
        tier.close()


def test_what_was_written_to_while_it_was_copied_is_damaged(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that comes late writes to shared memory when its record was looked at already."""
    # The store may still have records of other tests, evicted or not.
    written, read = Records(700, 2, 1000, filled=True), Records(700, 2, 1000, filled=False)
    store = MooncakeSettings(address=master.address, call_timeout_s=TIMEOUT_S).open_store()
    assert store.put_slots(written.batch()).tolist() == [RecordOutcome.WRITTEN] * 2
    fill = mooncake.fill_slot

    def fill_late(address: int, data: memoryview) -> None:
        fill(address, data)
        view_slot(address, 1)[0] ^= 1

    monkeypatch.setattr(mooncake, "fill_slot", fill_late)
    found = store.get_slots(read.names, read.slots, record_bytes=1000)
    assert found.outcomes.tolist() == [RecordOutcome.DAMAGED] * 2
    store.remove([name.key for name in list_names(written.names)])
    store.close()


@contextmanager
def fake_client(monkeypatch: pytest.MonkeyPatch, *lines: object) -> Iterator[MooncakeSettings]:
    """Its process says what it is told to, line by line, whatever it is asked."""
    code = "import socket, sys, time; end = socket.socket(fileno=int(sys.argv[2])); "
    code += "end.sendall(sys.argv[1].encode()); time.sleep(60)"
    said = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)

    start = subprocess.Popen

    def start_fake(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        *_, end, _ = command
        return start([sys.executable, "-c", code, said, end], **options)

    monkeypatch.setattr(subprocess, "Popen", start_fake)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = MooncakeAddress(host="127.0.0.1", port=listener.getsockname()[1])
        yield MooncakeSettings(address=address, call_timeout_s=TIMEOUT_S)


READY, SET_UP = {"answer": "ready"}, {"answer": 0}


def test_what_could_not_be_removed_is_not_called_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_client(monkeypatch, READY, SET_UP, {"answer": [0, -704]}, {"answer": [0, -706]}) as settings:
        store = settings.open_store()
        assert store.remove([b"one", b"two"]) == [True, False]
        with pytest.raises(StoreFaultError, match="could not remove all that it was told to: Mooncake's code is -706"):
            store.remove([b"one", b"two"])
        store.close()


def test_an_interrupted_put_codes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    class InterruptingCoder(RecordCoder):
        coded = 0

        def encode(self, group: int, record: Value, *, is_wanted: bool = False) -> bytes | None:
            self.coded += 1
            if self.coded == 2:
                store.interrupt()
            return super().encode(group, record, is_wanted=is_wanted)

    coder = InterruptingCoder(Coding.ON)
    nothing_there, mapped = {"answer": [0] * 5}, {"answer": 0}
    with fake_client(monkeypatch, READY, SET_UP, nothing_there, mapped) as settings:
        store = settings.open_store(coder)
        with pytest.raises(StoreFaultError):
            store.put_slots(Records(0, 5, 20_000, filled=True, has_numbers=True).batch())
        assert coder.coded == 2
        store.close()


@pytest.mark.parametrize("line", ["no JSON", '"text"', "{}", {"other": 1}])
def test_a_client_that_talks_nonsense_is_a_fault(monkeypatch: pytest.MonkeyPatch, line: object) -> None:
    with (
        fake_client(monkeypatch, READY, line) as settings,
        pytest.raises(StoreFaultError, match="does not answer as it should"),
    ):
        settings.open_store()


def test_a_client_that_cannot_be_started_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/there/is/none")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = MooncakeAddress(host="127.0.0.1", port=listener.getsockname()[1])
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(StoreFaultError, match="cannot be started: No such file"):
            MooncakeSettings(address=address).open_store()
        assert len(os.listdir("/proc/self/fd")) == before


def test_nobody_there_is_said_in_one_line() -> None:
    with pytest.raises(StoreFaultError, match=r"no master: .*refused"):
        MooncakeSettings(address=MooncakeAddress(host="127.0.0.1", port=1)).open_store()

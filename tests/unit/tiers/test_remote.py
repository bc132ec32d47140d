"""The remote tier passes the contract over a dictionary, and a store that fails or hangs costs one timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvoffload import native
from kvoffload.errors import TierError
from kvoffload.tiers.base import RecordOutcome, Tier, TierState
from kvoffload.tiers.envelope import HEAD_BYTES
from kvoffload.tiers.record_coder import Coding, RecordCoder
from kvoffload.tiers.record_store import StoreFaultError
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from tests.kit.scarce_threads import scarce_threads
from tests.kit.tiers.dict_store import Place
from tests.kit.tiers.faulty_tier import FaultyTier
from tests.kit.tiers.learning_coder import check_learning
from tests.kit.tiers.seals import make_keys
from tests.kit.tiers.tier_contract import TIMEOUT_S, Records, TierContract, finish, get, put

UNAVAILABLE, LATE = RecordOutcome.UNAVAILABLE, RecordOutcome.LATE


def make_tier(
    place: Place,
    *,
    connections: int = 3,
    call_bytes: int = 1 << 20,
    coding: Coding = Coding.OFF,
    coder: RecordCoder | None = None,
    keys: native.SealKeys | None = None,
) -> RemoteTier:
    settings = RemoteTierSettings(
        place="dictionary",
        open_store=place.open,
        connections=connections,
        call_bytes=call_bytes,
        first_probe_s=0.005,
        last_probe_s=0.02,
        coder=coder or RecordCoder(coding),
    )
    tier = RemoteTier(settings)
    if keys is not None:
        tier.seal_with(keys)
    assert tier.wait_open(TIMEOUT_S)
    return tier


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def tier(place: Place) -> Iterator[RemoteTier]:
    tier = make_tier(place)
    yield tier
    place.gate.set()
    tier.close()
    assert place.opened == place.closed, "every connection is closed"


class TestRemoteTier(TierContract):
    @pytest.fixture
    def tier(self, place: Place) -> Iterator[Tier]:
        tier = make_tier(place)
        yield tier
        tier.close()


class TestRemoteTierThatCodes(TierContract):
    has_numbers = True

    @pytest.fixture
    def tier(self, place: Place) -> Iterator[Tier]:
        tier = make_tier(place, coding=Coding.ON)
        yield tier
        tier.close()


class TestRemoteTierThatSeals(TierContract):
    lists_digests = False

    @pytest.fixture
    def tier(self, place: Place) -> Iterator[Tier]:
        tier = make_tier(place, keys=make_keys(1))
        yield tier
        tier.close()


class TestRemoteTierThatCodesAndSeals(TierContract):
    has_numbers = True
    lists_digests = False

    @pytest.fixture
    def tier(self, place: Place) -> Iterator[Tier]:
        tier = make_tier(place, coding=Coding.ON, keys=make_keys(1))
        yield tier
        tier.close()


class TestRemoteTierOfOneConnectionThatAFaultyOneWears(TierContract):
    @pytest.fixture
    def tier(self, place: Place) -> Iterator[Tier]:
        tier = make_tier(place, connections=1)
        yield FaultyTier(tier)
        tier.close()


def await_state(tier: RemoteTier, state: TierState, reason: str = "") -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while (one := tier.health()[0]).state is not state or one.reason != reason:
        assert time.monotonic() < end_s
        time.sleep(0.002)


def test_a_store_that_answers_probes_and_nothing_else_is_tried_less_and_less_often(place: Place) -> None:
    """Each try may cost the start of a process."""
    waits_s = [0.002 * 2**at for at in range(8)]
    settings = RemoteTierSettings(
        place="dictionary", open_store=place.open, connections=1, first_probe_s=waits_s[0], last_probe_s=3600.0
    )

    def spoil(value: bytes) -> bytes:
        raise StoreFaultError("not this one")

    tier = RemoteTier(settings)
    assert tier.wait_open(TIMEOUT_S)
    put(tier, Records(0, 1, 1000, filled=True))
    place.change = spoil
    begun_s = time.monotonic()
    for lost in range(1, len(waits_s) + 1):
        await_state(tier, TierState.READY)
        assert get(tier, Records(0, 1, 1000, filled=False)).count(UNAVAILABLE) == 1
        assert tier.health()[0].counts["lost"] == lost
    await_state(tier, TierState.READY)
    assert time.monotonic() - begun_s >= sum(waits_s)
    tier.close()


@pytest.mark.parametrize("opens_alone", [True, False])
def test_connections_that_need_no_store_are_open_before_it_answers(place: Place, opens_alone: bool) -> None:
    place.gate.clear()
    tier = RemoteTier(
        RemoteTierSettings(place="dictionary", open_store=place.open, connections=3, opens_alone=opens_alone)
    )
    end_s = time.monotonic() + TIMEOUT_S
    while place.opened < (4 if opens_alone else 1) or not place.waiting:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    assert place.opened == (4 if opens_alone else 1), "the probe's connection waits for an answer"
    assert tier.health()[0].state is TierState.OPENING
    place.gate.set()
    tier.close()
    assert place.opened == place.closed


def test_small_records_travel_together(tier: RemoteTier, place: Place) -> None:
    put(tier, Records(0, 500, 1000, filled=True))
    get(tier, Records(0, 500, 1000, filled=False))
    assert [asked for asked in place.asked if asked[0] in ("put", "get")] == [("put", 500), ("get", 500)]
    place.asked.clear()
    put(tier, Records(1000, 5, 400_000, filled=True))
    assert sorted(asked for asked in place.asked if asked[0] == "put") == [("put", 1), ("put", 2), ("put", 2)]


def test_what_is_there_is_not_sent_again(tier: RemoteTier, place: Place) -> None:
    put(tier, Records(0, 4, 1000, filled=True))
    place.asked.clear()
    assert put(tier, Records(0, 6, 1000, filled=True)).count(RecordOutcome.WRITTEN) == 6
    assert [asked for asked in place.asked if asked[0] == "put"] == [("put", 2)]


def test_every_bit_of_a_value_is_looked_at(tier: RemoteTier, place: Place) -> None:
    record = Records(0, 1, 40, filled=True)
    put(tier, record)
    (key, value), read = *place.values.items(), Records(0, 1, 40, filled=False)
    for bit in range(8 * len(value)):
        broken = bytearray(value)
        broken[bit // 8] ^= 1 << bit % 8
        place.values[key] = bytes(broken)
        outcome = get(tier, read).outcomes[0]
        assert outcome == RecordOutcome.DAMAGED, bit
        assert not place.values, "it was removed"
    place.values[key] = value
    for length in range(len(value)):
        place.values[key] = value[:length]
        assert get(tier, read).outcomes[0] == RecordOutcome.DAMAGED
    place.values[key] = value + b"\0"
    assert get(tier, read).outcomes[0] == RecordOutcome.DAMAGED


def test_a_record_under_another_name_is_damaged(tier: RemoteTier, place: Place) -> None:
    put(tier, Records(0, 2, 40, filled=True))
    one, other = place.values
    place.values[one] = place.values[other]
    assert get(tier, Records(0, 2, 40, filled=False)).outcomes.tolist() == [
        RecordOutcome.DAMAGED,
        RecordOutcome.FOUND,
    ]


def test_a_store_that_is_gone_is_asked_nothing_until_it_is_back(tier: RemoteTier, place: Place) -> None:
    written = Records(0, 3, 1000, filled=True)
    put(tier, written)
    place.fault = "connection refused"
    assert get(tier, Records(0, 3, 1000, filled=False)).count(UNAVAILABLE) == 3
    assert tier.health()[0].state is TierState.ABSENT
    assert tier.health()[0].reason == "connection refused"
    asked = len(place.asked)
    for _ in range(20):
        assert put(tier, Records(9, 1, 10, filled=True)).count(UNAVAILABLE) == 1
    assert len(place.asked) == asked
    place.fault = ""
    await_state(tier, TierState.READY)
    read = Records(0, 3, 1000, filled=False)
    for _ in range(9):
        assert get(tier, read).count(RecordOutcome.FOUND) == 3, "no connection of before is used"
    assert np.array_equal(read.memory, written.memory)
    assert tier.health()[0].counts["lost"] == 1


def test_a_store_that_hangs_makes_batches_late_and_touches_no_slot_later(tier: RemoteTier, place: Place) -> None:
    put(tier, Records(0, 2, 1000, filled=True))
    place.gate.clear()
    read = Records(0, 2, 1000, filled=False)
    tickets = [tier.get(read.names, read.slots, record_bytes=1000, timeout_s=0.01) for _ in range(6)]
    late: dict[int, list[int]] = {}
    while len(late) < len(tickets):
        late |= {batch.ticket: batch.outcomes.tolist() for batch in tier.poll()}
    assert late == {ticket: [LATE, LATE] for ticket in tickets}
    place.gate.set()
    assert put(tier, Records(5, 1, 10, filled=True)).count(RecordOutcome.WRITTEN) == 1
    assert not read.memory.any()
    assert tier.health()[0].counts["get_late"] == 12


def test_what_waits_ends_with_the_store(place: Place) -> None:
    tier = make_tier(place, connections=1)
    place.gate.clear()
    records = Records(0, 2, 1000, filled=True)
    tickets = [tier.look(records.names, timeout_s=TIMEOUT_S) for _ in range(5)]
    place.fault = "it has hung up"
    place.gate.set()
    ended: dict[int, list[int]] = {}
    while len(ended) < len(tickets):
        ended |= {batch.ticket: batch.outcomes.tolist() for batch in tier.poll()}
    assert set(map(tuple, ended.values())) == {(UNAVAILABLE, UNAVAILABLE)}
    tier.close()


def test_requests_go_before_what_is_written(place: Place) -> None:
    tier = make_tier(place, connections=1)
    records = Records(0, 1, 100, filled=True)
    place.gate.clear()
    first = tier.look(records.names, timeout_s=TIMEOUT_S)
    written = tier.put(records.batch(), timeout_s=TIMEOUT_S)
    read = tier.get(records.names, records.slots, record_bytes=100, timeout_s=TIMEOUT_S)
    place.gate.set()
    order: list[int] = []
    while len(order) < 3:
        order += [batch.ticket for batch in tier.poll()]
    assert order == [first, read, written]
    tier.close()


def test_connections_are_open_before_anybody_asks(tier: RemoteTier, place: Place) -> None:
    """Three, and the one that looks whether the store is there. Some take longer to open than a look may take."""
    end_s = time.monotonic() + TIMEOUT_S
    while place.opened < 4:
        assert time.monotonic() < end_s
        time.sleep(0.002)
    records = Records(0, 6, 100, filled=True)
    put(tier, records)
    get(tier, records)
    assert place.opened == 4


def test_what_comes_before_the_first_answer_waits_for_it(place: Place) -> None:
    place.gate.clear()
    tier = RemoteTier(RemoteTierSettings(place="dictionary", open_store=place.open))
    assert tier.health()[0].state is TierState.OPENING
    records = Records(0, 2, 100, filled=True)
    ticket = tier.put(records.batch(), timeout_s=TIMEOUT_S)
    place.gate.set()
    assert finish(tier, ticket).count(RecordOutcome.WRITTEN) == 2
    tier.close()


def test_a_tier_without_its_store_is_absent_from_the_beginning(place: Place) -> None:
    place.fault = "no such host"
    tier = make_tier(place)
    assert (tier.health()[0].state, tier.health()[0].reason) == (TierState.ABSENT, "no such host")
    assert put(tier, Records(0, 1, 10, filled=True)).count(UNAVAILABLE) == 1
    with pytest.raises(TierError, match="dictionary cannot be listed: no such host"):
        tier.scan(timeout_s=TIMEOUT_S)
    place.fault = ""
    await_state(tier, TierState.READY)
    tier.close()


def test_a_store_that_is_gone_is_absent_for_what_is_wrong_now(tier: RemoteTier, place: Place) -> None:
    place.fault = "connection refused"
    assert get(tier, Records(0, 1, 10, filled=False)).count(UNAVAILABLE) == 1
    await_state(tier, TierState.ABSENT, "connection refused")
    place.fault = "wrong password"
    await_state(tier, TierState.ABSENT, "wrong password")


def test_a_connection_that_hangs_does_not_hold_up_the_end(place: Place) -> None:
    tier = make_tier(place, connections=1)
    records = Records(0, 1, 100, filled=False)
    place.gate.clear()
    ticket = tier.get(records.names, records.slots, record_bytes=100, timeout_s=TIMEOUT_S)
    while not place.waiting:
        time.sleep(0.001)
    with pytest.raises(TierError, match="a connection hangs"):
        tier.close(timeout_s=0.01)
    assert [(batch.ticket, batch.outcomes.tolist()) for batch in tier.poll()] == [(ticket, [UNAVAILABLE])]
    place.gate.set()


def test_slots_and_names_have_to_fit(tier: RemoteTier) -> None:
    records = Records(0, 3, 100, filled=False)
    with pytest.raises(TierError, match="3 records cannot lie in 2 slots"):
        tier.get(records.names, records.slots[:2], record_bytes=100, timeout_s=TIMEOUT_S)


def test_many_threads_may_ask(tier: RemoteTier) -> None:
    written = Records(0, 20, 2000, filled=True)
    put(tier, written)
    read = [Records(0, 20, 2000, filled=False) for _ in range(8)]

    def ask(records: Records) -> None:
        for _ in range(10):
            assert tier.get(records.names, records.slots, record_bytes=2000, timeout_s=TIMEOUT_S) is not None

    threads = [threading.Thread(target=ask, args=[records]) for records in read]
    for thread in threads:
        thread.start()
    found = 0
    while found < 80:
        for batch in tier.poll():
            assert batch.count(RecordOutcome.FOUND) == 20
            found += 1
    for thread in threads:
        thread.join()
    for records in read:
        assert np.array_equal(records.memory, written.memory)
    assert finish(tier, tier.look(written.names, timeout_s=TIMEOUT_S)).count(RecordOutcome.FOUND) == 20


def make_numbers(*, filled: bool) -> Records:
    return Records(0, 4, 20_000, filled=filled, has_numbers=True)


@pytest.mark.parametrize("reader", list(Coding))
def test_records_are_coded_where_it_is_wanted_and_read_whatever_is_wanted(place: Place, reader: Coding) -> None:
    written, read = make_numbers(filled=True), make_numbers(filled=False)
    tiers = {coding: make_tier(place, coding=coding) for coding in Coding}
    assert put(tiers[Coding.ON], written).count(RecordOutcome.WRITTEN) == 4
    assert all(len(value) < HEAD_BYTES + 0.8 * 20_000 for value in place.values.values())
    counts = tiers[Coding.ON].health()[0].counts
    assert (counts["coded_records"], counts["coded_bytes"]) == (4, 80_000)
    assert counts["coded_stored_bytes"] == sum(map(len, place.values.values())) - 4 * HEAD_BYTES
    assert get(tiers[reader], read).count(RecordOutcome.FOUND) == 4
    assert np.array_equal(read.memory, written.memory)
    for tier in tiers.values():
        tier.close()


def test_what_another_server_has_written_counts_as_written_and_not_as_coded(place: Place) -> None:
    one, other = make_tier(place, coding=Coding.ON), make_tier(place, coding=Coding.ON)
    for tier, coded in ((one, 4), (other, 0)):
        assert put(tier, make_numbers(filled=True)).count(RecordOutcome.WRITTEN) == 4
        counts = tier.health()[0].counts
        assert (counts["put_written"], counts.get("coded_records", 0)) == (4, coded)
    one.close()
    other.close()


@pytest.mark.parametrize("writer", [Coding.OFF, Coding.AUTO])
def test_records_that_are_not_coded_are_read_by_who_codes(place: Place, writer: Coding) -> None:
    """Before anything is known of the store's speed, nothing is coded."""
    written, read = make_numbers(filled=True), make_numbers(filled=False)
    one, other = make_tier(place, coding=writer), make_tier(place, coding=Coding.ON)
    put(one, written)
    assert {len(value) for value in place.values.values()} == {HEAD_BYTES + 20_000}
    assert get(other, read).count(RecordOutcome.FOUND) == 4
    assert np.array_equal(read.memory, written.memory)
    one.close()
    other.close()


def test_a_coded_record_that_is_damaged_is_a_miss_and_removed(place: Place) -> None:
    tier = make_tier(place, coding=Coding.ON)
    put(tier, make_numbers(filled=True))
    [first, second, third, _] = place.values
    place.values[first] = place.values[first][:-1]
    place.values[second] = place.values[second][:5000] + b"\0\0\0\0" + place.values[second][5004:]
    place.values[third] = place.values[third][:HEAD_BYTES] + b"\2" + place.values[third][HEAD_BYTES + 1 :]
    assert get(tier, make_numbers(filled=False)).outcomes.tolist() == [RecordOutcome.DAMAGED] * 3 + [
        RecordOutcome.FOUND
    ]
    assert len(place.values) == 1
    tier.close()


def test_what_is_read_decides_what_is_coded(place: Place) -> None:
    check_learning(lambda coder: make_tier(place, coder=coder))


class HearingCoder(RecordCoder):
    """Notes what it is told of jobs that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[tuple[int, int]] = []

    def told_waiting(self, jobs: int, connections: int) -> None:
        self.waiting.append((jobs, connections))


def test_who_codes_hears_how_much_waits_to_be_sent(place: Place) -> None:
    coder = HearingCoder()
    tier = make_tier(place, connections=1, coder=coder)
    place.gate.clear()
    written = [Records(4 * at, 4, 1000, filled=True) for at in range(3)]
    for one in written:
        tier.put(one.batch(), timeout_s=TIMEOUT_S)
    place.gate.set()
    ended = 0
    while ended < 3:
        ended += len(tier.poll())
        time.sleep(0.001)
    assert coder.waiting[-2:] == [(1, 1), (0, 1)]
    tier.close()


@pytest.mark.parametrize("spare", range(5))
def test_a_tier_without_all_its_threads_is_refused_and_leaves_none(place: Place, spare: int) -> None:
    """Three connections, one that watches deadlines, one that probes."""
    before = set(threading.enumerate())
    with scarce_threads(spare=spare), pytest.raises(TierError, match="a thread for dictionary cannot be started"):
        make_tier(place)
    assert set(threading.enumerate()) <= before
    assert place.opened == place.closed


def test_without_a_thread_a_listing_is_refused_and_the_tier_goes_on(tier: RemoteTier) -> None:
    with scarce_threads(), pytest.raises(TierError, match="cannot be listed: can't start new thread"):
        tier.scan(timeout_s=TIMEOUT_S)
    assert tier.scan(timeout_s=TIMEOUT_S).cursor == 0


def found(place: Place, keys: native.SealKeys | None, first: int, count: int) -> int:
    """Returns how many records a server with these keys finds."""
    tier = make_tier(place, keys=keys)
    written, read = (Records(first, count, 1000, filled=filled) for filled in (True, False))
    ended = get(tier, read)
    are_found = ended.outcomes == RecordOutcome.FOUND
    assert np.array_equal(read.memory[are_found], written.memory[are_found])
    assert np.array_equal(ended.digests[are_found], written.digests[are_found])
    tier.close()
    return int(are_found.sum())


def store(place: Place, keys: native.SealKeys | None, first: int, count: int) -> None:
    tier = make_tier(place, keys=keys)
    assert put(tier, Records(first, count, 1000, filled=True)).count(RecordOutcome.WRITTEN) == count
    tier.close()


def test_no_byte_of_a_sealed_record_is_in_the_store(place: Place) -> None:
    store(place, make_keys(1), 0, 5)
    store(place, None, 5, 1)
    rows = Records(0, 6, 1000, filled=True).memory
    are_there = [any(row[:16].tobytes() in value for value in place.values.values()) for row in rows]
    assert are_there == [False] * 5 + [True]


def test_a_rotated_key_opens_and_a_lost_one_makes_misses_that_are_replaced(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    store(place, make_keys(1), 0, 5)
    store(place, make_keys(2, 1), 5, 5)
    assert found(place, make_keys(2, 1), 0, 10) == 10
    assert found(place, make_keys(2), 5, 5) == 5
    # Without keys they are of a version that is not known, and stay.
    assert found(place, None, 0, 10) == 0
    assert len(place.values) == 10
    assert not caplog.messages
    assert found(place, make_keys(2), 0, 10) == 5
    assert len(place.values) == 5
    assert [message.partition(": ")[2][:9] for message in caplog.messages] == ["5 records"]
    store(place, make_keys(2), 0, 5)
    assert found(place, make_keys(2), 0, 10) == 10


def test_a_record_that_is_not_sealed_is_removed_by_a_tier_that_seals(place: Place) -> None:
    store(place, None, 0, 5)
    assert found(place, make_keys(1), 0, 5) == 0
    assert not place.values
    store(place, make_keys(1), 0, 5)
    assert found(place, make_keys(1), 0, 5) == 5


def test_a_sealed_record_cannot_be_put_in_another_ones_place(place: Place) -> None:
    store(place, make_keys(1), 0, 2)
    first, second = place.values
    place.values[first], place.values[second] = place.values[second], place.values[first]
    assert found(place, make_keys(1), 0, 2) == 0
    store(place, make_keys(1), 0, 2)
    # Nor with the other one's head.
    heads = [place.values[key][:HEAD_BYTES] for key in (first, second)]
    bodies = [place.values[key][HEAD_BYTES:] for key in (first, second)]
    place.values[first], place.values[second] = heads[0] + bodies[1], heads[1] + bodies[0]
    assert found(place, make_keys(1), 0, 2) == 0

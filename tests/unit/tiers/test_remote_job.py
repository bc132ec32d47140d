"""A batch ends once, whichever thread ends it, and its slots are not touched afterwards."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest

from kvoffload.tiers.base import Addresses, RecordBatch, RecordNames, RecordOutcome
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.record_store import FoundRecords, SlotStore, StoreFacts, StoreFaultError
from kvoffload.tiers.remote_job import Verb
from tests.kit.tiers.dict_store import DictStore, Place
from tests.kit.tiers.jobs import make_job
from tests.kit.tiers.seals import make_keys
from tests.kit.tiers.tier_contract import Records

FOUND, LATE, FAILED, WRITTEN = RecordOutcome.FOUND, RecordOutcome.LATE, RecordOutcome.FAILED, RecordOutcome.WRITTEN
CALL_BYTES = 1 << 20


class HangingStore(SlotStore):
    """Moves nothing until it is interrupted; then it fails."""

    def __init__(self) -> None:
        self.is_asked, self.is_cut = threading.Event(), threading.Event()

    def _hang(self) -> None:
        self.is_asked.set()
        self.is_cut.wait()
        raise StoreFaultError("it was interrupted")

    def put_slots(self, batch: RecordBatch) -> npt.NDArray[np.uint8]:
        self._hang()
        raise AssertionError

    def get_slots(self, names: RecordNames, slots: Addresses, *, record_bytes: int) -> FoundRecords:
        self._hang()
        raise AssertionError

    def look(self, keys: Sequence[bytes], *, is_use: bool = False) -> list[bool]:
        return [False] * len(keys)

    def remove(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def probe(self) -> StoreFacts:
        return StoreFacts()

    def interrupt(self) -> None:
        self.is_cut.set()

    def close(self) -> None:
        pass


def test_what_is_put_is_got() -> None:
    store, written, read = DictStore(Place()), Records(0, 3, 1000, filled=True), Records(0, 4, 1000, filled=False)
    put, get = make_job(Verb.PUT, written), make_job(Verb.GET, read)
    put.serve(store, CALL_BYTES, RecordCoder())
    get.serve(store, CALL_BYTES, RecordCoder())
    ended = put.end(FAILED), get.end(FAILED)
    assert ended[0] is not None
    assert ended[1] is not None
    assert ended[0].outcomes.tolist() == [WRITTEN] * 3
    assert ended[1].outcomes.tolist() == [FOUND] * 3 + [RecordOutcome.MISSING]
    assert np.array_equal(read.memory[:3], written.memory)
    assert ended[1].parents[:96] == written.parents


@pytest.mark.parametrize("verb", [Verb.PUT, Verb.GET])
@pytest.mark.parametrize(("call_bytes", "calls"), [(1 << 20, 1), (2 * 1136, 3), (1, 5)])
def test_records_are_moved_in_calls_of_a_size(verb: Verb, call_bytes: int, calls: int) -> None:
    place, records = Place(), Records(0, 5, 1000, filled=True)
    make_job(verb, records).serve(DictStore(place), call_bytes, RecordCoder())
    assert len([asked for asked in place.asked if asked[0] == verb.value]) == calls


def test_a_job_ends_once() -> None:
    records = Records(0, 2, 100, filled=False)
    job = make_job(Verb.LOOK, records)
    ended = job.end(LATE)
    assert ended is not None
    assert ended.outcomes.tolist() == [LATE, LATE]
    assert job.end(FAILED) is None
    assert ended.outcomes.tolist() == [LATE, LATE]


@pytest.mark.parametrize("verb", list(Verb))
def test_a_job_that_is_over_asks_nothing_and_touches_nothing(verb: Verb) -> None:
    place, written, records = Place(), Records(0, 2, 100, filled=True), Records(0, 2, 100, filled=False)
    make_job(Verb.PUT, written).serve(DictStore(place), CALL_BYTES, RecordCoder())
    assert len(place.values) == 2
    place.asked.clear()
    job = make_job(verb, records)
    job.end(LATE)
    job.serve(DictStore(place), CALL_BYTES, RecordCoder())
    assert not place.asked
    assert not records.memory.any()


def test_a_job_that_ends_while_values_come_takes_no_more() -> None:
    place, written, records = Place(), Records(0, 2, 100, filled=True), Records(0, 2, 100, filled=False)
    make_job(Verb.PUT, written).serve(DictStore(place), CALL_BYTES, RecordCoder())
    assert len(place.values) == 2
    job = make_job(Verb.GET, records)

    def end_first(value: bytes) -> bytes:
        job.end(LATE)
        return value

    place.change = end_first
    job.serve(DictStore(place), CALL_BYTES, RecordCoder())
    assert not records.memory.any()


@pytest.mark.parametrize("verb", [Verb.PUT, Verb.GET])
def test_a_store_that_moves_records_itself_is_interrupted(verb: Verb) -> None:
    """The job ends with the interrupter's outcome, whichever thread is first afterwards."""
    store, records = HangingStore(), Records(0, 2, 100, filled=True)
    job = make_job(verb, records)
    faults: list[str] = []

    def serve() -> None:
        try:
            job.serve(store, CALL_BYTES, RecordCoder())
        except StoreFaultError as fault:
            faults.append(str(fault))

    thread = threading.Thread(target=serve)
    thread.start()
    store.is_asked.wait()
    ended = job.end(LATE)
    thread.join()
    assert ended is not None
    assert ended.outcomes.tolist() == [LATE, LATE]
    assert job.is_interrupted
    assert faults == ["it was interrupted"]
    assert job.end(FAILED) is None


@pytest.mark.parametrize("verb", [Verb.PUT, Verb.GET])
def test_a_store_that_moves_records_itself_and_cannot_seal_is_asked_for_none_with_keys(verb: Verb) -> None:
    coder = RecordCoder()
    coder.keys = make_keys(1)
    store = HangingStore()
    with pytest.raises(StoreFaultError, match="it cannot seal records, and seal_key_file is set"):
        make_job(verb, Records(0, 2, 100, filled=True)).serve(store, CALL_BYTES, coder)
    assert not store.is_asked.is_set()

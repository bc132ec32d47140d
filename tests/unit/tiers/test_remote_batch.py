"""A large batch is cut for several connections, and comes back in one piece."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from kvoffload.tiers.base import RecordOutcome
from kvoffload.tiers.record_coder import RecordCoder
from kvoffload.tiers.remote import RemoteTier, RemoteTierSettings
from kvoffload.tiers.remote_batch import RemoteBatch
from kvoffload.tiers.remote_job import Verb
from tests.kit.tiers.dict_store import DictStore, Place
from tests.kit.tiers.jobs import make_job
from tests.kit.tiers.tier_contract import TIMEOUT_S, Records, finish, get

FOUND, MISSING, LATE = RecordOutcome.FOUND, RecordOutcome.MISSING, RecordOutcome.LATE


@pytest.mark.parametrize(
    ("verb", "count", "record_bytes", "pieces"),
    [
        (Verb.GET, 0, 100, [0]),
        (Verb.GET, 10, 100, [10]),
        (Verb.GET, 11, 100, [5, 6]),
        (Verb.PUT, 20, 100, [10, 10]),
        (Verb.PUT, 31, 100, [7, 8, 8, 8]),
        (Verb.GET, 500, 100, [125, 125, 125, 125]),
        (Verb.GET, 1, 5000, [1]),
        (Verb.GET, 3, 5000, [1, 1, 1]),
        (Verb.LOOK, 500, 0, [500]),
    ],
)
def test_a_batch_is_cut_where_its_calls_stay_large(
    verb: Verb, count: int, record_bytes: int, pieces: list[int]
) -> None:
    records = Records(0, count, record_bytes, filled=True)
    whole = make_job(verb, records)
    batch = RemoteBatch(whole, connections=4, call_bytes=1000)
    parts = [job.batch for job in batch.jobs]
    assert [len(part.names) for part in parts] == pieces
    assert b"".join(part.names.hashes for part in parts) == whole.batch.names.hashes
    for name in ("slots", "digests"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(whole.batch, name).tolist()
    assert b"".join(part.parents for part in parts) == whole.batch.parents


def test_it_ends_with_the_last_of_its_jobs_in_the_order_of_its_records() -> None:
    place, written, read = Place(), Records(1, 2, 1000, filled=True), Records(0, 4, 1000, filled=False)
    make_job(Verb.PUT, written).serve(DictStore(place), 1 << 20, RecordCoder())
    batch = RemoteBatch(make_job(Verb.GET, read), connections=3, call_bytes=1000)
    first, second, last = batch.jobs
    for job in (last, first):
        job.serve(DictStore(place), 1 << 20, RecordCoder())
        ended = job.end(LATE)
        assert ended is not None
        assert batch.take(job, ended) is None
    ended = second.end(LATE)
    assert ended is not None
    whole = batch.take(second, ended)
    assert whole is not None
    assert whole.outcomes.tolist() == [MISSING, LATE, FOUND, MISSING]
    assert len(whole.digests) == 4
    assert len(whole.parents) == 4 * 32


class MetStore(DictStore):
    """A store whose gets wait for each other."""

    together = threading.Barrier(4, timeout=TIMEOUT_S)

    def get(self, keys: Sequence[bytes], limit_bytes: int) -> list[memoryview | None]:
        self.together.wait()
        return super().get(keys, limit_bytes)


def test_a_large_batch_has_all_connections() -> None:
    place, read = Place(), Records(0, 7, 1000, filled=False)
    written = Records(0, 7, 1000, filled=True)
    make_job(Verb.PUT, written).serve(DictStore(place), 1 << 20, RecordCoder())
    tier = RemoteTier(RemoteTierSettings(place="a test", open_store=lambda: MetStore(place), call_bytes=2000))
    ended = get(tier, read)
    assert ended.outcomes.tolist() == [FOUND] * 7
    assert np.array_equal(read.memory, written.memory)
    assert tier.health()[0].counts == {"get_found": 7}
    finish(tier, tier.remove(read.names, timeout_s=TIMEOUT_S))
    tier.close()

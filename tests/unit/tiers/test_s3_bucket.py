"""Requests that fail, hang, are cut off or answered with what was, through a proxy before a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("obstore", reason="obstore is not installed")

import obstore

from kvoffload.tiers.base import RecordOutcome, TierState
from kvoffload.tiers.remote import RemoteTier
from kvoffload.tiers.s3 import WHOLE_BYTES
from kvoffload.tiers.s3_bucket import GAP_BYTES, PART_BYTES, Ranges, S3Bucket, explain_fault, join_ranges
from tests.kit.server.tiers import await_that
from tests.kit.tiers.fault_proxy import Asked, Fault, FaultProxy, stand_before
from tests.kit.tiers.s3_server import S3Server, await_state, client, make_tier
from tests.kit.tiers.tier_contract import Records, finish, get, look, put

FOUND, MISSING, UNAVAILABLE = RecordOutcome.FOUND, RecordOutcome.MISSING, RecordOutcome.UNAVAILABLE
SIZES = pytest.mark.parametrize("record_bytes", [1000, WHOLE_BYTES])


@pytest.fixture
def proxy(weed: S3Server) -> Iterator[FaultProxy]:
    with stand_before(weed.endpoint) as proxy:
        yield proxy


@pytest.fixture
def tier(weed: S3Server, proxy: FaultProxy) -> Iterator[RemoteTier]:
    tier = make_tier(replace(weed.settings(), endpoint=proxy.endpoint))
    yield tier
    proxy.is_over.set()
    tier.close()


def test_small_records_travel_together(tier: RemoteTier, proxy: FaultProxy) -> None:
    put(tier, Records(0, 500, 1000, filled=True))
    assert (proxy.count("PUT", "/pack/"), proxy.count("PUT", "/index-"), proxy.count("PUT")) == (1, 1, 2)
    proxy.asked.clear()
    assert get(tier, Records(100, 300, 1000, filled=False)).count(FOUND) == 300
    assert [(asked.verb, "/pack/" in asked.what) for asked in proxy.asked if "probe" not in asked.what] == [
        ("GET", True)
    ]


def test_what_is_there_is_not_sent_again(tier: RemoteTier, weed: S3Server, proxy: FaultProxy) -> None:
    for record_bytes in (1000, WHOLE_BYTES):
        records = Records(record_bytes, 4, record_bytes, filled=True)
        put(tier, records)
        proxy.asked.clear()
        assert put(tier, records).count(RecordOutcome.WRITTEN) == 4
        assert proxy.count("PUT") == 0


@SIZES
@pytest.mark.parametrize("fault", [Fault.ERROR, Fault.RESET])
@pytest.mark.parametrize("verb", ["put", "get", "look"])
def test_a_store_that_fails_is_absent_until_it_is_well(
    tier: RemoteTier, proxy: FaultProxy, fault: Fault, verb: str, record_bytes: int
) -> None:
    written = Records(0, 3, record_bytes, filled=True)
    put(tier, written)
    proxy.fault = lambda asked: fault
    records = Records(9 if verb == "put" else 0, 3, record_bytes, filled=verb == "put")
    if verb == "look":
        ended = finish(tier, tier.look(records.names, timeout_s=60))
    else:
        ended = put(tier, records) if verb == "put" else get(tier, records)
    assert ended.count(UNAVAILABLE) == 3
    [health] = tier.health()
    assert health.state is TierState.ABSENT
    assert "\n" not in health.reason
    if fault is Fault.ERROR:
        assert health.reason in ("500 InternalError: Not today.", "it answers with status 500")
    proxy.fault = lambda asked: Fault.NONE
    await_state(tier, TierState.READY)
    read = Records(0, 3, record_bytes, filled=False)
    assert get(tier, read).count(FOUND) == 3
    assert np.array_equal(read.memory, written.memory)
    assert put(tier, Records(9, 3, record_bytes, filled=True)).count(RecordOutcome.WRITTEN) == 3


def test_one_failure_is_tried_again(tier: RemoteTier, proxy: FaultProxy) -> None:
    failed: list[Asked] = []

    def once(asked: Asked) -> Fault:
        if asked in failed or "probe" in asked.what:
            return Fault.NONE
        failed.append(asked)
        return Fault.ERROR

    proxy.fault = once
    assert put(tier, Records(0, 3, 1000, filled=True)).count(RecordOutcome.WRITTEN) == 3
    assert get(tier, Records(0, 3, 1000, filled=False)).count(FOUND) == 3
    assert len(failed) >= 4
    assert tier.health()[0].counts.get("lost", 0) == 0


@SIZES
def test_a_store_that_hangs_costs_one_deadline_and_is_asked_nothing_more(
    weed: S3Server, proxy: FaultProxy, record_bytes: int
) -> None:
    settings = weed.settings()
    near = make_tier(settings)
    put(near, Records(0, 40, record_bytes, filled=True))
    near.close()
    tier = make_tier(replace(settings, endpoint=proxy.endpoint, call_timeout_s=2.0))
    proxy.fault = lambda asked: Fault.HANG
    proxy.asked.clear()
    read = Records(0, 40, record_bytes, filled=False)
    assert get(tier, read).count(UNAVAILABLE) == 40
    asked = sum("probe" not in one.what for one in proxy.asked)
    assert asked <= 32, "of 40 records, those that were under way"
    for _ in range(20):
        assert get(tier, read).count(UNAVAILABLE) == 40
    assert sum("probe" not in one.what for one in proxy.asked) == asked
    assert tier.health()[0].reason == "it takes too long"
    assert tier.health()[0].counts["lost"] == 1
    proxy.fault = lambda asked: Fault.NONE
    await_state(tier, TierState.READY)
    # A machine that has much to do may be taken for one that hangs, for a moment.
    await_that(lambda: get(tier, read).count(FOUND) == 40)
    tier.close()


@SIZES
@pytest.mark.parametrize("part", ["/pack/", "/record/", "/index-", "list-type"])
def test_an_answer_that_is_cut_off_is_no_answer(
    weed: S3Server, proxy: FaultProxy, part: str, record_bytes: int
) -> None:
    settings = weed.settings()
    records = Records(0, 3, record_bytes, filled=True)
    near = make_tier(settings)
    put(near, records)
    near.close()
    tier = make_tier(replace(settings, endpoint=proxy.endpoint))
    proxy.fault = lambda asked: Fault.CUT if part in asked.what and "probe" not in asked.what else Fault.NONE
    read = Records(0, 3, record_bytes, filled=False)
    ended = get(tier, read)
    assert ended.count(FOUND) == 0 or np.array_equal(read.memory, records.memory)
    assert ended.count(FOUND) + ended.count(MISSING) + ended.count(UNAVAILABLE) == 3
    proxy.fault = lambda asked: Fault.NONE
    await_state(tier, TierState.READY)
    assert get(tier, read).count(FOUND) == 3
    assert np.array_equal(read.memory, records.memory)
    tier.close()


def test_what_a_store_says_stays_in_one_line_of_the_log() -> None:
    said = 'kind: Connect, message: "refused\nan entry\x1b[2J"'
    assert explain_fault(ValueError(said)) == "refused an entry [2J"
    said = "status code: 503 <Code>Slow\nDown</Code> <Message>not\x1b[2J\nso fast</Message>"
    assert explain_fault(ValueError(said)) == "503 Slow Down: not [2J so fast"


def test_of_an_object_that_is_too_long_no_more_is_read(weed: S3Server) -> None:
    settings = weed.settings()
    value = bytes(range(250)) * (PART_BYTES // 100)
    obstore.put(client(settings), "long", value)
    bucket = S3Bucket(settings)

    async def ask() -> None:
        for limit in (100, PART_BYTES, PART_BYTES + 100, len(value), len(value) + 1):
            [found] = await bucket.get(["long"], limit, lambda _, data: data)
            assert found == value[:limit]
        assert await bucket.get_version("long", len(value) - 1) is None
        whole = await bucket.get_version("long", len(value))
        assert whole is not None
        assert whole[0] == value

    asyncio.run(ask())


@SIZES
def test_lists_of_before_make_misses_and_no_wrong_bytes(weed: S3Server, proxy: FaultProxy, record_bytes: int) -> None:
    settings = weed.settings()
    near, tier = make_tier(settings), make_tier(replace(settings, endpoint=proxy.endpoint))
    records = Records(0, 4, record_bytes, filled=True)
    assert look(tier, records.names) == [False] * 4
    proxy.fault = lambda asked: Fault.STALE if asked.is_list else Fault.NONE
    put(near, records)
    assert look(tier, records.names) == [False] * 4
    proxy.fault = lambda asked: Fault.NONE
    assert look(tier, records.names) == [True] * 4
    proxy.answers.clear()
    assert look(tier, Records(0, 5, 1, filled=False).names) == [True] * 4 + [False]
    proxy.fault = lambda asked: Fault.STALE if asked.is_list else Fault.NONE
    finish(near, near.remove(records.names, timeout_s=60))
    for asked in (tier, make_tier(replace(settings, endpoint=proxy.endpoint))):
        assert get(asked, Records(0, 4, record_bytes, filled=False)).count(MISSING) == 4
        again = Records(0, 4, record_bytes + 1, filled=True)
        assert put(asked, again).count(RecordOutcome.WRITTEN) == 4
        read = Records(0, 4, record_bytes + 1, filled=False)
        assert get(asked, read).count(FOUND) == 4
        assert np.array_equal(read.memory, again.memory)
        asked.remove(records.names, timeout_s=60)
        asked.close()
    near.close()


@pytest.mark.parametrize(
    ("ranges", "spans"),
    [
        ([], []),
        ([(5, 10)], [(5, 15, [0])]),
        ([(100, 10), (0, 10)], [(0, 110, [1, 0])]),
        ([(0, 10), (GAP_BYTES + 9, 1)], [(0, GAP_BYTES + 10, [0, 1])]),
        ([(0, 10), (GAP_BYTES + 10, 1)], [(0, 10, [0]), (GAP_BYTES + 10, GAP_BYTES + 11, [1])]),
        ([(0, PART_BYTES), (PART_BYTES, 5)], [(0, PART_BYTES, [0]), (PART_BYTES, PART_BYTES + 5, [1])]),
        ([(0, 100), (20, 10)], [(0, 100, [0, 1])]),
        ([(3, 0)], []),
    ],
)
def test_ranges_that_lie_together_are_one_request(
    ranges: list[tuple[int, int]], spans: list[tuple[int, int, list[int]]]
) -> None:
    wanted = Ranges(path="p", starts=[start for start, _ in ranges], sizes=[size for _, size in ranges])
    assert [(span.start, span.end, list(span.numbers)) for span in join_ranges(wanted)] == spans

"""Requests and answers are read as they were written; what asks for too much is refused at once."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.peers.requests import (
    ANSWER_BYTES,
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    BadRequestError,
    LinkAnswer,
    LinkRequest,
    LinkStatus,
    LinkVerb,
    answer_only,
    read_answer,
    read_answer_head,
    read_head,
)
from kvoffload.tiers.base import RecordNames


def request(verb: LinkVerb, count: int, **more: object) -> LinkRequest:
    names = RecordNames(fingerprint=b"F" * 32, hashes=bytes(range(32)) * count, group=3, shard=2)
    is_put = verb is LinkVerb.PUT
    return LinkRequest(
        verb=verb,
        names=names,
        record_bytes=5000,
        digests=b"d" * 8 * count if is_put else b"",
        parents=b"p" * 32 * count if is_put else b"",
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("verb", list(LinkVerb))
@pytest.mark.parametrize("count", [0, 1, 17])
def test_a_request_is_read_as_it_was_written(verb: LinkVerb, count: int) -> None:
    written = request(verb, count)
    frame = written.pack()
    head = read_head(frame[:HEAD_BYTES])
    assert head.rest_bytes == len(frame) - HEAD_BYTES
    assert head.read_rest(frame[HEAD_BYTES:]) == written


@pytest.mark.parametrize(
    ("offset", "form", "value", "fault"),
    [
        (0, "<I", 1, "no request"),
        (4, "<H", 99, "no request"),
        (16, "<I", MAX_RECORDS + 1, "allowed are 4096"),
        (24, "<Q", MAX_RECORD_BYTES + 1, "allowed are"),
    ],
)
def test_what_is_no_request_or_too_large_is_refused(offset: int, form: str, value: int, fault: str) -> None:
    frame = bytearray(request(LinkVerb.GET, 1).pack()[:HEAD_BYTES])
    struct.pack_into(form, frame, offset, value)
    with pytest.raises(BadRequestError, match=fault):
        read_head(bytes(frame))


@given(st.binary(min_size=HEAD_BYTES, max_size=HEAD_BYTES))
def test_whatever_comes_is_a_request_or_refused(frame: bytes) -> None:
    try:
        head = read_head(frame)
    except BadRequestError:
        return
    assert head.rest_bytes <= MAX_RECORDS * 72


def test_an_answer_is_about_what_was_asked() -> None:
    written = LinkAnswer(outcomes=np.array([4, 5, 4], np.uint8), digests=np.array([1, 0, 2**64 - 1], np.uint64))
    frame = written.pack()
    status, rest = read_answer_head(frame[:ANSWER_BYTES], 3)
    assert rest == len(frame) - ANSWER_BYTES
    read = read_answer(status, frame[ANSWER_BYTES:])
    assert read.outcomes.tolist() == [4, 5, 4]
    assert read.digests.tolist() == [1, 0, 2**64 - 1]
    with pytest.raises(BadRequestError, match="about 3 records, not 4"):
        read_answer_head(frame[:ANSWER_BYTES], 4)
    with pytest.raises(BadRequestError, match="no answer"):
        read_answer_head(b"x" * ANSWER_BYTES, 3)


def test_outcomes_that_are_none_are_refused() -> None:
    strange = LinkAnswer(outcomes=np.array([4, 99], np.uint8), digests=np.zeros(2, np.uint64)).pack()
    with pytest.raises(BadRequestError, match="outcomes that are none"):
        read_answer(LinkStatus.OK, strange[ANSWER_BYTES:])


def test_a_refusal_has_no_records() -> None:
    frame = answer_only(LinkStatus.UNKNOWN_IDENTITY).pack()
    assert read_answer_head(frame, 3) == (LinkStatus.UNKNOWN_IDENTITY, 0)

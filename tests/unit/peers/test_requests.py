"""Requests and answers are read as they were written; what asks for too much is refused at once."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvoffload.peers.requests import (
    ANSWER_BYTES,
    CODE,
    HEAD_BYTES,
    MAX_RECORD_BYTES,
    MAX_RECORDS,
    BadRequestError,
    LinkAnswer,
    LinkRequest,
    LinkStatus,
    LinkVerb,
    answer_only,
    pack_code,
    read_answer,
    read_answer_head,
    read_code,
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
    head = read_answer_head(frame[:ANSWER_BYTES], 3)
    assert head.rest_bytes == len(frame) - ANSWER_BYTES
    read = read_answer(head, frame[ANSWER_BYTES:])
    assert read.outcomes.tolist() == [4, 5, 4]
    assert read.digests.tolist() == [1, 0, 2**64 - 1]
    with pytest.raises(BadRequestError, match="about 3 records, not 4"):
        read_answer_head(frame[:ANSWER_BYTES], 4)
    with pytest.raises(BadRequestError, match="no answer"):
        read_answer_head(b"x" * ANSWER_BYTES, 3)


def test_outcomes_that_are_none_are_refused() -> None:
    strange = LinkAnswer(outcomes=np.array([4, 99], np.uint8), digests=np.zeros(2, np.uint64)).pack()
    with pytest.raises(BadRequestError, match="outcomes that are none"):
        read_answer(read_answer_head(strange[:ANSWER_BYTES], 2), strange[ANSWER_BYTES:])


def test_a_refusal_has_no_records() -> None:
    frame = answer_only(LinkStatus.UNKNOWN_IDENTITY).pack()
    head = read_answer_head(frame, 3)
    assert (head.status, head.rest_bytes) == (LinkStatus.UNKNOWN_IDENTITY, 0)


OLD_HEAD = struct.Struct("<4sHxxIIIIQ32s")
"""The head of requests as servers without coded records read and write it."""


def test_servers_from_before_coded_records_read_requests_and_ask_for_none() -> None:
    frame = request(LinkVerb.GET, 2, code=CODE, wait_ms=7).pack()
    read = OLD_HEAD.unpack(frame[:HEAD_BYTES])
    assert read == (b"KVPR", LinkVerb.GET, 3, 2, 2, 7, 5000, b"F" * 32)
    assert read_head(OLD_HEAD.pack(*read)).code == 0
    assert request(LinkVerb.GET, 2, wait_ms=7).pack()[:HEAD_BYTES] == OLD_HEAD.pack(*read)


@pytest.mark.parametrize("code", [0, CODE, CODE + 1, 0xFFFF])
def test_a_request_of_any_code_is_read(code: int) -> None:
    """A later version may take others; it is answered without a code then."""
    frame = request(LinkVerb.GET, 1, code=code).pack()
    assert read_head(frame[:HEAD_BYTES]).read_rest(frame[HEAD_BYTES:]).code == code


@pytest.mark.parametrize(("answered", "asked"), [(CODE, 0), (CODE + 1, CODE), (CODE + 1, 0)])
def test_an_answer_in_a_code_that_nobody_asked_for_is_refused(answered: int, asked: int) -> None:
    answer = LinkAnswer(outcomes=np.array([4], np.uint8), digests=np.array([1], np.uint64), code=answered).pack()
    with pytest.raises(BadRequestError, match=f"in code {answered}, where {asked} was asked for"):
        read_answer_head(answer[:ANSWER_BYTES], 1, code=asked)


@pytest.mark.parametrize("asked", [0, CODE])
def test_an_answer_says_whether_records_behind_it_are_coded(asked: int) -> None:
    answer = LinkAnswer(outcomes=np.array([4], np.uint8), digests=np.array([1], np.uint64), code=asked).pack()
    head = read_answer_head(answer[:ANSWER_BYTES], 1, code=CODE)
    assert (head.code, read_answer(head, answer[ANSWER_BYTES:]).code) == (asked, asked)


def test_records_of_a_put_are_in_a_code_that_is_known() -> None:
    assert [read_code(pack_code(code)) for code in (0, CODE)] == [0, CODE]
    with pytest.raises(BadRequestError, match="records in code 2, where 1 was allowed"):
        read_code(pack_code(CODE + 1))

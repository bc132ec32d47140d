"""Drain and adopt."""

from __future__ import annotations

from kvoffload.protocol import CODEC, Adopt, AdoptAnswer, AdoptVerdict, Answer, Call
from kvoffload.protocol.limits import MAX_SEGMENTS


def test_the_largest_memory_can_be_told() -> None:
    message = Adopt(former_boot_id=1, index_bytes=2**40, segment_sizes=b"\xff" * 8 * MAX_SEGMENTS)
    found = CODEC.decode_call(CODEC.encode_call(message, number=1))
    assert isinstance(found, Call)
    assert found.message == message


def test_an_offer_is_wanted_or_there_is_a_reason() -> None:
    assert AdoptVerdict(0) is AdoptVerdict.WANTED
    answer = AdoptAnswer(verdict=AdoptVerdict.OWNER_LIVES)
    assert CODEC.decode_answer(CODEC.encode_answer(answer, number=1, boot_id=2)) == Answer(answer, 1, 2)

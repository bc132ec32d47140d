"""The text of an error always fits into a message."""

from __future__ import annotations

import pytest

from kvoffload.protocol import CODEC, ErrorCode, Stats
from kvoffload.server.common.refusal import one_line, refuse


@pytest.mark.parametrize("text", ["a\nb\x00\u2028", "\U0001f600" * 1000, "\ud800 lone", ""])
def test_any_text_becomes_a_line_of_the_protocol(text: str) -> None:
    answer = refuse(Stats(), ErrorCode.INTERNAL, text)
    CODEC.encode_answer(answer, number=1, boot_id=1)
    assert answer.message.startswith("stats: ")


def test_an_error_says_whether_to_try_again() -> None:
    assert refuse(Stats(), ErrorCode.BUSY, "").retryable
    assert not refuse(Stats(), ErrorCode.NOT_FOUND, "").retryable
    assert one_line("as it is") == "as it is"

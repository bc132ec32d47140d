"""Error codes, and what a wrong message is told."""

from __future__ import annotations

import pytest

from kvoffload.protocol import ErrorCode, ProtocolFault
from kvoffload.protocol.faults import FieldError


def test_codes_have_numbers_from_one_on() -> None:
    assert [code.value for code in ErrorCode] == list(range(1, len(ErrorCode) + 1))


@pytest.mark.parametrize("code", ErrorCode)
def test_only_what_passes_by_itself_is_worth_another_try(code: ErrorCode) -> None:
    assert code.is_retryable is (code in (ErrorCode.BUSY, ErrorCode.INTERNAL))
    assert ProtocolFault(code=code, message="m").retryable is code.is_retryable


def test_a_line_says_where_what_and_what_is_allowed() -> None:
    fault = FieldError("33 bytes", "multiples of 32")
    fault.path = ".chain"
    assert fault.describe("acquire") == "acquire.chain: 33 bytes, allowed: multiples of 32"

"""The answers that any message may get."""

from __future__ import annotations

from kvoffload.protocol import MESSAGES, Error, ErrorCode, ProtocolFault, answer_fault
from kvoffload.protocol.message import Reply, Request


def test_a_fault_becomes_an_error_that_says_what_it_is_about() -> None:
    fault = ProtocolFault(code=ErrorCode.TOO_LARGE, message="acquire.chain: too much", op=4, number=9)
    assert answer_fault(fault) == Error(code=ErrorCode.TOO_LARGE, message="acquire.chain: too much", about_op=4)


def test_every_reply_answers_a_request_or_all_of_them() -> None:
    replies = {message for message in MESSAGES if issubclass(message, Reply)}
    asked = {message.reply for message in MESSAGES if issubclass(message, Request)}
    assert replies == asked | {Error}

"""The two answers that any request may get: an error, and done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from kvoffload.protocol.faults import ErrorCode, ProtocolFault
from kvoffload.protocol.fields import U16, U32, Choice, Flag, Line
from kvoffload.protocol.message import CONTROL, EXPRESS, LIFELINE, Reply


@dataclass(frozen=True, kw_only=True)
class Error(Reply):
    """Answers whatever is not served: refusals, wrong messages, unknown operations. To a one-way message too."""

    op = 64
    channels = CONTROL + LIFELINE + EXPRESS

    code: Annotated[ErrorCode, Choice(ErrorCode), "why"]
    message: Annotated[Line, "one line for people: what, where, what is allowed"]
    retryable: Annotated[Flag, "the same message may succeed later on this connection"] = False
    retry_after_ms: Annotated[U32, "not earlier than this; 0: unknown"] = 0
    about_op: Annotated[U16, "operation of what is answered; 0: it could not be read"] = 0
    field: Annotated[Line, "the field that differs, in a refusal"] = ""
    server_value: Annotated[Line, "its value here, in full unless beyond the length of a line"] = ""
    client_value: Annotated[Line, "its value there, likewise"] = ""


@dataclass(frozen=True, kw_only=True)
class Done(Reply):
    """It is done, and there is nothing to tell."""

    op = 65
    channels = CONTROL + EXPRESS


def answer_fault(fault: ProtocolFault) -> Error:
    """Makes the answer to the sender of a wrong frame."""
    return Error(code=fault.code, message=fault.message, retryable=fault.retryable, about_op=fault.op)

"""Makes error answers, in the same way everywhere in the server."""

from __future__ import annotations

from kvoffload.protocol import ClientMessage, Error, ErrorCode
from kvoffload.protocol.shape import name_of

_LETTERS = 120
"""Number of characters of a message: they fit a line of the protocol in any alphabet."""


def refuse(message: ClientMessage, code: ErrorCode, line: str) -> Error:
    """Returns the answer to a message that is not served."""
    text = f"{name_of(type(message))}: {line}"
    return Error(code=code, message=one_line(text), retryable=code.is_retryable, about_op=message.op)


def one_line(text: str) -> str:
    """Returns a text as one line that fits the wire, whatever an exception or a peer said."""
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_LETTERS]

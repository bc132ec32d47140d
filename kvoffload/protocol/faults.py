"""Error codes that say what is wrong with a message, and the value that a wrong frame becomes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ErrorCode(IntEnum):
    """Why a message was not served. A number is never used again."""

    MALFORMED = 1
    """Not a message: the frame is not one msgpack array, or a field has the wrong type, length or range."""
    TOO_LARGE = 2
    """The message is beyond a limit of this protocol; a smaller one may work."""
    UNKNOWN_OPERATION = 3
    """The receiver has no such operation on this channel, or the agreed version has none."""
    VERSION = 4
    """The ranges of protocol versions have nothing in common."""
    MISMATCH = 5
    """Domain, hash, identity or geometry differ; `field` and both values say where."""
    NOT_ALLOWED = 6
    """The peer's credentials or token do not permit it."""
    NO_SESSION = 7
    """The session is unknown, quarantined or of another server: greet again on the lifeline."""
    NOT_GREETED = 8
    """Sent before hello was accepted."""
    NOT_REGISTERED = 9
    """Sent before register was accepted."""
    UNSUPPORTED = 10
    """Needs a capability that was not agreed."""
    NOT_FOUND = 11
    """The namespace, group, shard or lease does not exist."""
    BUSY = 12
    """A queue is at its bound."""
    DRAINING = 13
    """The server takes nothing new; releases are still served."""
    OUT_OF_ORDER = 14
    """A one-way message was lost, repeated or too many: the session is reset."""
    INTERNAL = 15
    """A fault of the server. The message was not served, the server lives."""

    @property
    def is_retryable(self) -> bool:
        """Whether the same message may succeed later on this connection."""
        return self in (ErrorCode.BUSY, ErrorCode.INTERNAL)


class FieldError(ValueError):
    """A value that a field does not allow. `path` grows on the way out, so that the line can name the field."""

    def __init__(self, found: str, allowed: str, code: ErrorCode = ErrorCode.MALFORMED) -> None:
        super().__init__(found, allowed)
        self.found = found
        self.allowed = allowed
        self.code = code
        self.path = ""

    def describe(self, place: str) -> str:
        """Returns one line: where, what was found, what is allowed."""
        return f"{place}{self.path}: {self.found}, allowed: {self.allowed}"


@dataclass(frozen=True, kw_only=True)
class ProtocolFault:
    """A frame that is not a message. `op` and `number` are 0 where they could not be read."""

    code: ErrorCode
    message: str
    op: int = 0
    number: int = 0

    @property
    def retryable(self) -> bool:
        return self.code.is_retryable
